# SPDX-License-Identifier: Apache-2.0
"""The version is stated in one place, and every command prints it without heavy imports."""

import re
import subprocess
import sys

import yaml

from components import __version__
from launching import REPO

RECIPES = sorted(
    path for path in (REPO / "recipes").glob("*.py") if "Arguments(" in path.read_text()
)
COMMANDS = [
    path
    for path in sorted((REPO / "scripts").glob("*.py"))
    if '__name__ == "__main__"' in path.read_text()
]
# torch is imported by all that is slow: here an import of it ends the interpreter
WITHOUT_TORCH = """
import io, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
sys.modules["torch"] = None
*paths, flag = sys.argv[1:]
for path in paths:
    sys.path.insert(0, path.rpartition("/")[0])
    sys.argv = [path, flag]
    said, code = io.TextIOWrapper(io.BytesIO()), 0
    try:
        with redirect_stdout(said), redirect_stderr(io.TextIOWrapper(io.BytesIO())):
            runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        code = end.code or 0
    said.flush()
    text = said.buffer.getvalue().decode().strip()
    print(path.rpartition("/")[2], code, text, sep="|")
"""


def outcomes_without_torch(paths, flag):
    """{name of a program: exit code and what it prints} in one interpreter that has no torch."""
    words = [sys.executable, "-c", WITHOUT_TORCH, *map(str, paths), flag]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {name: rest for name, *rest in (line.split("|") for line in done.stdout.splitlines())}


def test_the_changelog_begins_with_it():
    heading = re.search(r"^## (\S+)", (REPO / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading[1] == __version__


def test_the_citation_names_it_and_the_license():
    citation = yaml.safe_load((REPO / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (__version__, "Apache-2.0")
    assert "Apache License\n" in (REPO / "LICENSE").read_text()


def test_commands_print_it_and_refuse_a_wrong_flag_before_heavy_imports():
    programs = [*COMMANDS, RECIPES[0]]
    names = [path.name for path in programs]
    told = outcomes_without_torch(programs, "--version")
    assert told == {name: ["0", f"{name} {__version__}"] for name in names}
    refused = outcomes_without_torch(COMMANDS, "--no_such_flag")
    assert refused == {path.name: ["64", ""] for path in COMMANDS}
