# SPDX-License-Identifier: Apache-2.0
"""Models that are evaluated, and lm-eval as the command has it."""

import importlib
import sys
from argparse import Namespace

import pytest

from adapter_folders import make_base, write_adapters
from evaluation import harness

# lm-eval needs Hugging Face's package of this name, tests of all commands need scripts/evaluate.py
COMMAND = sys.modules.pop("evaluate", None)
before = list(sys.path)
harness.prepare(Namespace(tasks="own.yaml", confirm_run_unsafe_code=False))
importlib.import_module("lm_eval.models.huggingface")
sys.path[:] = before
sys.modules.pop("evaluate", None)
if COMMAND is not None:
    sys.modules["evaluate"] = COMMAND


@pytest.fixture(scope="session")
def base(once):
    """The folder of an untrained model with rows."""
    return once("evaluation_base", make_base)


@pytest.fixture(scope="session")
def adapters(base, once):
    """The folder of a run with random adapters on that model."""
    return once("evaluation_adapters", lambda folder: write_adapters(folder, base))
