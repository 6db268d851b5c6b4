# SPDX-License-Identifier: Apache-2.0
"""A warm start (tests/warm) is what a cold one would have been: streams and environment.

That its figures are the same is seen in test_stops.py, where launches of the golden runs are cold.
"""

import os
import subprocess
import sys

import pytest

import net

if "WARM_PYTHON" not in os.environ:
    pytest.skip("all starts are cold", allow_module_level=True)


@pytest.fixture
def start(tmp_path):
    """A function that starts a small program warm, with a pipe for each of its streams."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)

    def started(text, *arguments, **options):
        (tmp_path / "program.py").write_text(text)
        command = [sys.executable, tmp_path / "program.py", *arguments]
        return subprocess.Popen(command, **pipes | {"text": True} | options)

    return started


def test_it_has_what_its_caller_has_and_the_libraries_and_no_file_of_this_project(start, tmp_path):
    text = (
        "import os, sys\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['WARM_X'], __name__)\n"
        "print(sys.stdin.read(), sys.path[0], 'torch' in sys.modules)\n"
        "del sys.modules['__mp_main__']\n"  # what multiprocessing made of the server's own file
        "files = [str(vars(module).get('__file__')) for module in sys.modules.values()]\n"
        f"print([name for name in files + sys.path if name.startswith('{net.REPO}/recipes')])\n"
        "print('told', file=sys.stderr)\n"
    )
    environment = os.environ | {"WARM_X": "7"}
    out, told = start(text, "a b", "--c", cwd=tmp_path, env=environment).communicate("typed")
    expected = f"['a b', '--c'] {tmp_path} 7 __main__\ntyped {tmp_path} True\n[]\n"
    assert (out, told) == (expected, "told\n")


def test_what_imports_have_read_otherwise_starts_cold_and_says_why(start):
    name = "OMP_NUM_THREADS"
    process = start("import sys\nprint('torch' in sys.modules)", env=os.environ | {name: "2"})
    out, told = process.communicate()
    assert out == "False\n" and f"another value of {name}" in told
