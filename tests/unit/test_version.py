# SPDX-License-Identifier: Apache-2.0
"""The version is stated in one place, and every command prints it without heavy imports."""

import importlib
import re
import subprocess
import sys

import pytest
import yaml

from components import __version__
from components.cli import parse_arguments
from launching import REPO

RECIPES = sorted(
    path for path in (REPO / "recipes").glob("*.py") if "Arguments(" in path.read_text()
)
COMMANDS = [
    path
    for path in sorted((REPO / "scripts").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
# torch is imported by all that is slow
WITHOUT_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


def test_the_changelog_begins_with_it():
    heading = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading[1] == __version__


def test_the_citation_names_it_and_the_license():
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert "Apache License\n" in (REPO / "LICENSE").read_text()


@pytest.mark.parametrize("path", [*COMMANDS, RECIPES[0]], ids=lambda path: path.stem)
def test_a_command_prints_it_before_heavy_imports(path):
    words = [sys.executable, "-c", WITHOUT_TORCH, path, "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{path.name} {__version__}", "False"]


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_a_command_refuses_a_wrong_flag_before_heavy_imports(path):
    words = [sys.executable, "-c", WITHOUT_TORCH, path, "--no_such_flag"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (64, "False\n"), done.stderr


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_prints_it(path, capsys):
    with pytest.raises(SystemExit, match="0"):
        parse_arguments(importlib.import_module(path.stem).Arguments, words=["--version"])
    assert capsys.readouterr().out.endswith(f" {__version__}\n")
