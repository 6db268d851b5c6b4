# SPDX-License-Identifier: Apache-2.0
"""lm-eval gets Hugging Face's package evaluate, and no code of the hub."""

import importlib.util
import sys
from pathlib import Path

import pytest

from evaluation import harness
from paths import SCRIPTS


@pytest.fixture
def command(monkeypatch):
    """The command evaluate.py as a module that was imported by its name."""
    spec = importlib.util.spec_from_file_location("evaluate", SCRIPTS / "evaluate.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "evaluate", module)
    return module


def test_the_package_takes_the_place_of_the_command(command, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    before = list(sys.path)
    harness.prepare(may_run_code=True)
    package = sys.modules["evaluate"]
    assert package is not command and Path(package.__file__).parent != SCRIPTS
    assert sys.path == before


def test_a_metric_that_is_code_on_the_hub_is_refused(command, refused):
    harness.prepare(may_run_code=False)
    code, line = refused(sys.modules["evaluate"].load, "squad_v2")
    assert code == 64 and "squad_v2" in line and "--confirm_run_unsafe_code" in line
