# SPDX-License-Identifier: Apache-2.0
"""The map of scripts/planner/: it names every module, and each imports only modules above it."""

import ast
import re

import pytest

import planner
from paths import SCRIPTS

FOLDER = SCRIPTS / "planner"
MODULES = re.findall(r"^    (\w+) {2,}", planner.__doc__, re.MULTILINE)


def imported_by(module):
    """Names of the package's modules that a module imports, including those inside functions."""
    names = set()
    for node in ast.walk(ast.parse((FOLDER / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            if node.module:
                names.add(node.module)
            else:  # from . import name
                names.update(alias.name for alias in node.names)
    return names


def test_the_map_names_every_module():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert set(MODULES) == files


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_modules_above_it(module):
    above = set(MODULES[: MODULES.index(module)])
    assert imported_by(module) <= above


def test_only_one_module_knows_the_recipe_and_one_the_config_files():
    """So that a change of theirs is a change of one file here. A probe runs inside the recipe."""
    for module in MODULES:
        text = (FOLDER / f"{module}.py").read_text()
        imported = set(re.findall(r"^\s*(?:import|from) ([\w.]+)", text, re.MULTILINE))
        packages = {name.split(".")[0] for name in imported}
        if module not in ("recipe", "yaml_files", "save_probe"):
            assert not packages & {"llama", "tasks"}, module
    assert "llama" not in (FOLDER / "yaml_files.py").read_text()
