# SPDX-License-Identifier: Apache-2.0
"""Fixtures for what is made once a run of pytest, by whichever worker asks first."""

import shutil

import pytest
from filelock import FileLock


@pytest.fixture(scope="session")
def shared(tmp_path_factory, worker_id):
    """A folder for what all workers of one run share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def once(shared):
    """A function from a name, and a function that makes a folder, to that folder of the run.

    The folder is made by the worker that asks first; the others wait.
    """

    def folder_of(name, make):
        folder = shared / name
        done = shared / f"{name}.done"
        with FileLock(f"{folder}.lock"):
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)  # left behind by an attempt that failed
                make(folder)
                done.touch()
        return folder

    return folder_of
