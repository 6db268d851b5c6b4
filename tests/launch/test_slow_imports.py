# SPDX-License-Identifier: Apache-2.0
"""A command tells a wrong flag and the version before the imports that take seconds."""

import subprocess
import sys

import pytest

from core import __version__
from launching import REPO

pytestmark = pytest.mark.cold("what it imports itself is looked at")
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


def test_commands_print_it_and_refuse_a_wrong_flag_before_heavy_imports():
    names = [path.name for path in COMMANDS]
    told = outcomes_without_torch(COMMANDS, "--version")
    assert told == {name: ["0", f"{name} {__version__}"] for name in names}
    refused = outcomes_without_torch(COMMANDS, "--no_such_flag")
    assert refused == {path.name: ["64", ""] for path in COMMANDS}
