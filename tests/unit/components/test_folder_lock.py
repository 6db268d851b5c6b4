# SPDX-License-Identifier: Apache-2.0
"""One output folder has one run at a time, and a run that was killed does not block the next."""

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from components import folder_lock
from components.folder_lock import NAME, FolderLock
from core.stop import HOST

RECIPES = Path(folder_lock.__file__).parents[1]
HOLD = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
from components.folder_lock import FolderLock
lock = FolderLock(pathlib.Path(sys.argv[2]))
print(lock.take(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path):
    """Another process that has the folder."""
    command = [sys.executable, "-c", HOLD, RECIPES, tmp_path]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([str(word) for word in command], text=True, **pipes) as process:
        assert process.stdout.readline() == "None\n"
        yield process
        process.kill()


def test_a_folder_that_another_run_has_is_refused_with_its_process(
    other_run, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(folder_lock, "SECONDS_ON_THIS_HOST", 0.5)
    problem = FolderLock(tmp_path).take()
    assert f"the run of process {other_run.pid} on {HOST} is writing there" in problem
    assert "choose another --output_dir" in problem
    assert capsys.readouterr().out.startswith("waiting up to 0.5 s until the run of process")


def test_the_folder_of_a_killed_run_is_free(other_run, tmp_path):
    other_run.kill()
    other_run.wait()
    assert (tmp_path / NAME).is_file()
    assert FolderLock(tmp_path).take() is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_that_a_file_system_has_no_locks_is_said_once(number, tmp_path, monkeypatch, capsys):
    def refuse(*arguments):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock = FolderLock(tmp_path)
    assert lock.take() is None and lock.take() is None
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"warning: --output_dir {tmp_path}: its file system has no locks ")
    assert os.strerror(number) in said
