# SPDX-License-Identifier: Apache-2.0
"""A wrong flag is told before the imports that take seconds."""

import subprocess
import sys

import pytest

from launching import REPO

pytestmark = pytest.mark.cold("what it imports itself is looked at")
# The program, words that end it, its exit code
RECIPES = sorted((REPO / "recipes").glob("*.py"))
CALLS = [(path, ["--output_dir", "run", "--sede", "1"], 64) for path in RECIPES]
CALLS.append((REPO / "recipes" / "vit.py", ["--columns", "imge=scan", "--output_dir", "run"], 64))
for name, words, code in (
    ("make_tiny", ["bert", "folder", "--dropout", "2"], 64),
    ("chat", ["--help"], 0),
    ("check_config", ["none.yaml"], 64),
):
    CALLS.append((REPO / "scripts" / f"{name}.py", words, code))
CODE = """
import atexit, runpy, sys
atexit.register(lambda: print("imported:", "torch" in sys.modules))
path, *sys.argv = sys.argv[1], *sys.argv[1:]
sys.path[0] = path.rpartition("/")[0]
runpy.run_path(path, run_name="__main__")
"""


@pytest.mark.parametrize(("path", "words", "code"), CALLS)
def test_a_call_ends_before_torch_is_imported(path, words, code, tmp_path):
    command = [sys.executable, "-c", CODE, str(path), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    assert "imported: False" in done.stdout
