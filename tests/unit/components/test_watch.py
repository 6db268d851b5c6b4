# SPDX-License-Identifier: Apache-2.0
"""What torchrun prints last, and what ranks know about a rank that has ended."""

import json
import os
import signal
import subprocess

import pytest

from components import watch
from components.status import HOST, Ending, process_status
from components.watch import Watch
from fakes import Exit
from launching import read_json

pytestmark = pytest.mark.usefixtures("new_process")


def test_a_rank_that_hangs_ends_though_a_peer_has_ended(folder, exits, monkeypatch):
    process_status().state = "running"
    monkeypatch.setattr(watch.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(watch.faulthandler, "dump_traceback", lambda: None)
    peer = subprocess.Popen(["true"])
    ours = Watch(str(folder))
    ours.peers = {os.pidfd_open(peer.pid): (1, peer.pid)}
    peer.wait()
    with pytest.raises(Exit):
        ours._end_this_rank([], hangs=True, timeout=60)
    assert exits == [1]
    assert read_json(folder / "status.json")["why"] == f"no sign of life for 60 s on {HOST}"


def test_a_stop_before_the_first_step_is_recorded_though_nobody_reads_the_output(
    folder, monkeypatch
):
    def refuse(*_, **__):
        raise BrokenPipeError

    ours = Watch(str(folder))
    monkeypatch.setattr("builtins.print", refuse)
    with pytest.raises(BrokenPipeError):
        ours._report_end_before_first_step(signal.SIGINT)
    status = read_json(folder / "status.json")
    assert (status["state"], status["exit_code"]) == ("stopped", 75)


class TestLastWords:
    """What torchrun prints last, and what the other ranks know of a rank that has ended."""

    def test_what_an_earlier_run_told_is_not_of_this_one(self, folder):
        failed = {"state": "failed", "exit_code": 70, "time": "2026-01-01 00:00:00"}
        (folder / "status.json").write_text(json.dumps(failed))
        process_status().began = "2026-01-01 00:00:01"
        assert process_status().reported_by_others() is None
        process_status().began = "2026-01-01 00:00:00"
        assert process_status().reported_by_others() == Ending("failed", 70)


@pytest.mark.parametrize(("path", "code"), [("run/metrics.jsonl", 73), ("rows.jsonl", 1)])
def test_an_error_of_a_file_in_it_is_73_later_too(path, code, folder, exits, capsys):
    error = IsADirectoryError(21, "Is a directory", str(folder / path))
    with pytest.raises(Exit):
        Watch(str(folder / "run")).on_exception(IsADirectoryError, error, None)
    told = capsys.readouterr().err.startswith("error: cannot read or write: ")
    assert exits == [code] and told == (code == 73)
