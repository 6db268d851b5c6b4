# SPDX-License-Identifier: Apache-2.0
"""A command ends with its exit code, and in silence when nobody reads its output any more."""

import os
import subprocess
import sys

import pytest

from launching import REPO

SCRIPTS = sorted(path for path in (REPO / "scripts").glob("*.py") if "__main__" in path.read_text())
PRINTS = """
import sys
sys.path.insert(0, "scripts")
from common import run_command

def main():
    {body}

run_command(main)
"""


def outcome_without_reader(*command, **environment):
    """Return the exit code of a command whose output nobody reads, and what it says on stderr."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, *command],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env=os.environ | environment,
        check=False,
    )
    os.close(writer)
    return done.returncode, done.stderr


def test_every_command_ends_by_the_same_function():
    for path in SCRIPTS:
        end = '\nif __name__ == "__main__":\n    run_command(main)\n'
        assert path.read_text().endswith(end), path.name


def test_a_command_whose_output_nobody_reads_ends_in_silence():
    command = ("scripts/check_config.py", "accelerate_configs/ddp.yaml")
    assert outcome_without_reader(*command, PYTHONUNBUFFERED="1") == (141, "")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("return 3", 3),
        ("print('much ' * 10**6); sys.exit(65)", 141),
        ("print('little'); sys.exit(65)", 141),
    ],
)
def test_the_exit_code_is_that_of_the_command_unless_its_output_was_lost(body, code):
    found, said = outcome_without_reader("-c", PRINTS.format(body=body), PYTHONUNBUFFERED="")
    assert found == code and said == ""
