# SPDX-License-Identifier: Apache-2.0
"""Imports lead down: from evidence/ to scripts/ to recipes/*.py, tasks/ and extras/, to core/."""

import ast
import re

import pytest

from launching import REPO

SCRIPTS = sorted((REPO / "scripts").glob("*.py"))
COMMANDS = {path.stem for path in SCRIPTS if '__name__ == "__main__"' in path.read_text()}
OF_SCRIPTS = {path.stem for path in (REPO / "scripts").iterdir()}
OF_EVIDENCE = {path.stem for path in (REPO / "evidence").iterdir() if path.name != "README.md"}
OF_TESTS = {path.stem for path in (REPO / "tests").glob("*.py")} | {"warm"}
FILES = [
    path for folder in ("recipes", "scripts") for path in sorted((REPO / folder).rglob("*.py"))
]


def packages_imported_by(text):
    """The first names of all modules that a file imports, including those inside functions."""
    modules = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module)
    return {module.split(".")[0] for module in modules}


def files_that_import(forbidden, imported):
    return [path for path, names in imported.items() if names & forbidden]


@pytest.fixture(scope="module")
def imported():
    """{path of a file in recipes or scripts: the first names of what it imports}."""
    return {str(path.relative_to(REPO)): packages_imported_by(path.read_text()) for path in FILES}


def test_nothing_imports_a_command_of_scripts(imported):
    assert len(COMMANDS) >= 12
    assert files_that_import(COMMANDS, imported) == []


def test_recipes_and_their_modules_import_nothing_of_scripts(imported):
    recipes = {path: names for path, names in imported.items() if path.startswith("recipes/")}
    assert len(recipes) >= 50
    assert files_that_import(OF_SCRIPTS, recipes) == []


@pytest.mark.parametrize(
    ("room", "allowed"),
    [("core", {"core"}), ("tasks", {"core", "tasks"}), ("extras", {"core", "extras"})],
)
def test_a_room_imports_itself_the_core_and_libraries_only(room, allowed, imported):
    own = {path: names for path, names in imported.items() if f"recipes/{room}/" in path}
    recipes = {path.stem for path in (REPO / "recipes").iterdir()}
    assert own and files_that_import(recipes - allowed, own) == []


def test_an_extra_imports_no_other_extra():
    for path in (REPO / "recipes" / "extras").rglob("*.py"):
        named = re.findall(r"^ *(?:from|import) extras\.(\w+)", path.read_text(), re.MULTILINE)
        assert set(named) <= {path.parent.name}, path


def test_nothing_that_people_use_imports_evidence_or_tests(imported):
    assert files_that_import(OF_EVIDENCE | OF_TESTS, imported) == []


@pytest.mark.parametrize("name", ["conftest", "launching", "ranks", "golden", "net"])
def test_what_launches_the_product_imports_nothing_of_it(name):
    imported = packages_imported_by((REPO / "tests" / f"{name}.py").read_text())
    recipes = {path.stem for path in (REPO / "recipes").iterdir()}
    assert not imported & (OF_SCRIPTS | recipes)
