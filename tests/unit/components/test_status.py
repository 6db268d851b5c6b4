# SPDX-License-Identifier: Apache-2.0
"""status.json says how a run ended, and a refused call does not change that of another run."""

import json
import os
import sys

import psutil
import pytest

from components.status import HOST, fail, process_status
from launching import read_json

pytestmark = pytest.mark.usefixtures("new_process")


@pytest.mark.parametrize(
    "words",
    [
        ["--output_dir", "FOLDER"],
        ["--output_dir=FOLDER"],
        [
            "--output_dir",
            "FOLDER/first",
            "--output_dir",
            "FOLDER",
        ],  # argparse takes the last of several
        ["--output_dir=FOLDER/first", "--seed", "1", "--output_dir=FOLDER"],
        ["--output-dir", "FOLDER"],
        ["--output_dir", "FOLDER/first", "--output-dir=FOLDER"],
    ],
    ids=str,
)
def test_a_wrong_call_is_recorded_where_its_run_would_have_been(words, tmp_path, monkeypatch):
    monkeypatch.setattr(
        sys,
        "argv",
        ["llama.py", *(word.replace("FOLDER", str(tmp_path)) for word in words), "--sed"],
    )
    with pytest.raises(SystemExit) as ended:
        fail(64, "no such argument: --sed")
    assert ended.value.code == 64
    status = read_json(tmp_path / "status.json")
    assert (status["state"], status["exit_code"], status["why"]) == (
        "failed",
        64,
        "no such argument: --sed",
    )


def test_a_wrong_call_leaves_the_status_of_a_run_that_is_going_on(tmp_path, monkeypatch):
    running = {"state": "running", "host": HOST, "process": os.getppid()}
    (tmp_path / "status.json").write_text(json.dumps(running))
    monkeypatch.setattr(sys, "argv", ["llama.py", "--output_dir", str(tmp_path), "--sed"])
    with pytest.raises(SystemExit):
        fail(64, "no such argument: --sed")
    assert read_json(tmp_path / "status.json") == running
    monkeypatch.setattr(psutil, "pid_exists", lambda process: False)  # it was killed
    process_status.cache_clear()
    with pytest.raises(SystemExit):
        fail(64, "no such argument: --sed")
    assert read_json(tmp_path / "status.json")["state"] == "failed"


@pytest.mark.parametrize("dry_run", ["--dry_run", "--dry-run"])
def test_a_wrong_dry_run_leaves_no_trace(dry_run, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py", "--output_dir", str(tmp_path), dry_run, "--sed"])
    with pytest.raises(SystemExit):
        fail(64, "no such argument: --sed")
    assert list(tmp_path.iterdir()) == []
