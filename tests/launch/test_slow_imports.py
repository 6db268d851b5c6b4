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
import io, itertools, runpy, sys
from contextlib import redirect_stderr, redirect_stdout
sys.modules["torch"] = None
for path, flag in itertools.product(sys.argv[1:], ("--version", "--no_such_flag")):
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
    print(path.rpartition("/")[2], flag, code, text, sep="|")
"""


def test_commands_print_it_and_refuse_a_wrong_flag_before_heavy_imports():
    words = [sys.executable, "-c", WITHOUT_TORCH, *map(str, COMMANDS)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = []
    for path in COMMANDS:
        expected.append(f"{path.name}|--version|0|{path.name} {__version__}")
        expected.append(f"{path.name}|--no_such_flag|64|")
    assert done.stdout.splitlines() == expected
