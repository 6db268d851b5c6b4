# SPDX-License-Identifier: Apache-2.0
"""What a warm start imports, and what it leaves to the interpreter itself."""

import os
import sys

import pytest

from paths import RECIPES, SCRIPTS
from warm import start as warm_start
from warm.imports import import_modules, library_imports, names_in
from warm.process import Request
from warm.python import can_start_warm, namespaces
from warm.server import Server

RECIPE = '''
"""A recipe."""
import os, json
import numpy as np
import rows
import components.rows
from components.upstream import patch
from torch.nn import functional as F
from proof import jobs

def main():
    import datasets
'''


@pytest.fixture
def project(tmp_path):
    """Folders recipes/, with a package, and scripts/."""
    for name in ("recipes/components", "evidence/proof"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "recipes" / "llama.py").write_text(RECIPE)
    (tmp_path / "recipes" / "rows.py").touch()
    return tmp_path


def test_only_libraries_are_imported_and_only_at_the_top_of_a_file(project):
    own = names_in(project / "recipes") | names_in(project / "scripts")
    assert own == {"llama", "rows", "components", "proof"}
    assert list(library_imports(project / "recipes" / "llama.py", own)) == [
        "import os, json",
        "import numpy as np",
        "from torch.nn import functional as F",
    ]


def test_no_file_of_the_recipes_is_among_the_libraries():
    own = names_in(RECIPES) | names_in(SCRIPTS)
    statements = set()
    for path in RECIPES.rglob("*.py"):
        statements.update(library_imports(path, own))
    assert "import torch" in statements
    assert not any("fault_tolerance" in statement for statement in statements)


def test_a_module_that_is_not_installed_is_left_out():
    import_modules(["no_such_module", "colorsys"])
    assert "colorsys" in sys.modules


@pytest.mark.parametrize(
    ("arguments", "is_warm"),
    [
        (["train.py", "-c"], True),
        (["-m", "accelerate.commands.launch"], True),
        (["-u", "train.py"], True),
        (["-u", "-m", "pytest"], True),
        (["-c", "print()"], False),
        (["-u", "-c", "print()"], False),
        (["-V"], False),
        (["-u"], False),
        ([], False),
    ],
)
def test_scripts_and_modules_start_warm(arguments, is_warm):
    assert can_start_warm(arguments) == is_warm


def request(**environment):
    return Request(["train.py"], environment, "/folder", 0o22, namespaces(), {})


@pytest.fixture
def server(monkeypatch):
    """A server whose imports have set a variable."""
    at_start = {"HF_HOME": "/cache", "OMP_NUM_THREADS": "1"}
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in (at_start | {"SET_BY_IMPORTS": "1"}).items():
        monkeypatch.setenv(name, value)
    return Server(listener=None, program="python", at_start=at_start, owner=None)


@pytest.mark.parametrize(
    ("environment", "reason"),
    [
        ({}, None),
        ({"SET_BY_IMPORTS": "1"}, None),
        ({"RANK": "1", "FAULT": "[]", "MASTER_PORT": "0", "TMPDIR": "/x"}, None),
        ({"PYTHONPATH": "/folder"}, None),  # which accelerate adds for DeepSpeed
        ({"PYTHONPATH": "/other"}, "another value of PYTHONPATH"),
        ({"SET_BY_IMPORTS": "2"}, "another value of SET_BY_IMPORTS"),
        ({"HF_HOME": "/x", "OMP_NUM_THREADS": "2"}, "another value of HF_HOME, OMP_NUM_THREADS"),
    ],
)
def test_a_variable_that_imports_have_read_otherwise_is_a_reason_for_a_cold_start(
    environment, reason, server
):
    asked = request(**{"HF_HOME": "/cache", "OMP_NUM_THREADS": "1"} | environment)
    found = server.reason_for_cold(asked)
    assert found == (reason and f"the libraries were imported with {reason}")


def test_a_folder_in_which_no_program_can_be_started_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(OSError, match="no program can be started"):
        warm_start.start(tmp_path)


def test_an_edit_of_the_server_makes_it_another_one(monkeypatch, tmp_path):
    (tmp_path / "warm_server.py").touch()
    monkeypatch.setattr(warm_start, "FILES", [tmp_path / "warm_server.py"])
    before = warm_start.default_folder()
    assert warm_start.default_folder() == before
    os.utime(tmp_path / "warm_server.py", (1, 1))
    assert warm_start.default_folder() != before
