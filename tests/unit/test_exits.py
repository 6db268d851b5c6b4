# SPDX-License-Identifier: Apache-2.0
"""A command ends with its exit code, and in silence when nobody reads its output any more."""

import os
import subprocess
import sys

from launching import REPO

SCRIPTS = sorted(path for path in (REPO / "scripts").glob("*.py") if "__main__" in path.read_text())


def test_every_command_ends_by_the_same_function():
    for path in SCRIPTS:
        end = '\nif __name__ == "__main__":\n    run_command(main)\n'
        assert path.read_text().endswith(end), path.name


def test_a_command_whose_output_nobody_reads_ends_in_silence():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "scripts/check_config.py", "accelerate_configs/ddp.yaml"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
