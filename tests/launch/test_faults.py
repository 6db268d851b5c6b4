# SPDX-License-Identifier: Apache-2.0
"""A fault planted in a process changes nothing on other ranks, and crashes where it should."""

import json
import os
import signal
import subprocess
import sys

import pytest

from launching import REPO

pytestmark = pytest.mark.cold("a small program, with components of its own")
FAULTS = REPO / "scripts" / "proof" / "faults.py"
RECIPE = """
import os, sys, threading
import components

Arguments = None


def start(kind, description):
    return None


class Trainer:
    def save(self, name):
        os.mkdir(name)
        os.rename(name, f"{name}-done")

    def write(self):
        with open("written", "w") as file:
            file.write("12345")


def main(args):
    print(sys.argv, sys.path[0])
    Trainer().save("first")
    Trainer().save("second")
    thread = threading.Thread(target=lambda: Trainer().write())
    thread.start()
    thread.join()
"""


def run_with(tmp_path, fault):
    """Run the recipe as a program on rank 0, with a planted fault."""
    (tmp_path / "components.py").touch()
    (tmp_path / "train.py").write_text(RECIPE)
    return subprocess.run(
        [sys.executable, FAULTS, "train.py", "--flag"],
        cwd=tmp_path,
        env=os.environ | {"FAULT": json.dumps(fault), "RANK": "0"},
        capture_output=True,
        text=True,
    )


def test_a_recipe_with_a_fault_on_another_rank_runs_as_python_would_run_it(tmp_path):
    done = run_with(tmp_path, {"do": "SIGTERM", "at": "recipe:Trainer.save", "rank": 1})
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"['train.py', '--flag'] {tmp_path}\n"
    assert (tmp_path / "second-done").is_dir()


SECOND_SAVE = {"do": "crash at change", "at": "recipe:Trainer.save", "call": 2, "rank": 0}


@pytest.mark.parametrize(
    ("change", "there", "missing"),
    [(1, "first-done", "second"), (2, "second", "second-done")],
)
def test_a_crash_happens_before_a_change_of_the_file_system(change, there, missing, tmp_path):
    done = run_with(tmp_path, SECOND_SAVE | {"change": change})
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / there).exists() and not (tmp_path / missing).exists()


def test_changes_after_the_call_count_only_for_a_fault_that_lasts(tmp_path):
    fault = SECOND_SAVE | {"call": 1, "change": 3}
    assert run_with(tmp_path, fault).returncode == 0
    lasting = run_with(tmp_path, fault | {"lasting": True})
    assert lasting.returncode == -signal.SIGKILL
    assert (tmp_path / "first-done").exists() and not (tmp_path / "second").exists()


def test_a_write_is_cut_in_a_thread_too(tmp_path):
    fault = {"do": "crash at byte", "at": "recipe:Trainer.write", "byte": 4}
    assert run_with(tmp_path, fault).returncode == -signal.SIGXFSZ
    assert (tmp_path / "written").read_text() == "1234"
