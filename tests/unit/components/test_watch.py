# SPDX-License-Identifier: Apache-2.0
"""What torchrun prints last, and what ranks know about a rank that has ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from components import watch
from components.ending import end_all_ranks
from components.hosts import SECONDS_BETWEEN_BEATS, Host
from components.status import HOST, Ending, fail, process_status
from components.watch import Watch
from fakes import Exit, alone
from launching import read_json

pytestmark = pytest.mark.usefixtures("new_process")


def test_a_rank_in_a_container_of_its_own_does_not_stop_the_others(become_rank, monkeypatch):
    """No process has its number here, or another one has, where the host has the same name."""
    nobody = 2**22 + 1  # above the largest number that Linux gives
    monkeypatch.setenv("GROUP_RANK", "0")
    here, there = (HOST, "0"), (HOST, "1")
    pids = [(0, here, os.getpid()), (1, here, nobody), (2, here, os.getppid()), (3, there, 1)]
    become_rank(0)
    monkeypatch.setattr(watch, "gather_object", lambda _: pids)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    started = []
    thread = SimpleNamespace(start=lambda: started.append(True))
    monkeypatch.setattr(watch.threading, "Thread", lambda **_: thread)
    ours = Watch("runs/llama")
    ours.join(alone(3), timeout=1)
    assert started == [True]
    for descriptor in ours.peers:
        os.close(descriptor)
    assert [*ours.peers.values()] == [(2, os.getppid())]


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


def test_a_rank_gives_the_first_of_its_host_time_to_say_how_another_host_ended(
    folder, exits, monkeypatch
):
    process_status().state = "running"
    slept = []
    monkeypatch.setattr(watch.time, "sleep", slept.append)
    ours = Watch(str(folder))
    ours.hosts.rank = 1
    ours.hosts.hosts = [Host("a", [0, 1]), Host("b", [2, 3])]
    ours.hosts.report = Ending.failed(73, "full", has_place=True)
    with pytest.raises(Exit):
        ours._end_with_other_hosts([])
    assert exits == [73]
    # The first one reads the store between beats, and its watch looks for that a moment later.
    assert sum(slept) > SECONDS_BETWEEN_BEATS + watch.SECONDS_BETWEEN_LOOKS


def test_from_then_on_other_hosts_are_told_how_it_ends(become_rank, monkeypatch):
    become_rank(0)
    monkeypatch.setattr(watch, "gather_object", lambda _: [])
    monkeypatch.setattr(watch.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    ours = Watch("runs/llama")
    told = []

    @contextlib.contextmanager
    def telling(ending):
        told.append((ending.text, process_status().state))
        yield

    monkeypatch.setattr(ours.hosts, "telling", telling)
    ours.join(alone(1), timeout=1)
    process_status().announce(Ending.failed(1, "why"))
    assert told == [("error: why", "starting")]  # before it counts as ended


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


@pytest.mark.parametrize("has_launcher", [True, False], ids=["launched", "started by hand"])
def test_a_rank_whose_launcher_is_gone_asks_for_a_stop(has_launcher, monkeypatch, capsys):
    if has_launcher:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    else:
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    ours = Watch("runs/llama")
    ours.take_signals()
    status = process_status()
    status.state = "running"
    launcher = os.getppid()
    monkeypatch.setattr(watch.os, "getppid", lambda: 1)
    look_once = iter([True, False])
    monkeypatch.setattr(type(status), "is_training", property(lambda _: next(look_once)))
    ours._look_after_ranks(timeout=60)
    assert ours.stop_requested == has_launcher
    told = f"error: the launcher (process {launcher}) is gone\n"
    assert capsys.readouterr().err == (told if has_launcher else "")


class TestLastWords:
    """What torchrun prints last, and what the other ranks know of a rank that has ended."""

    def launchers_report(self, path):
        failure = ProcessFailure(local_rank=0, pid=7, exitcode=64, error_file=str(path))
        return ChildFailedError("llama.py", {0: failure}).format_msg()

    def test_the_launchers_report_ends_with_the_reason(self, folder, errors, capsys):
        path = errors(0)
        with pytest.raises(SystemExit, match="64"):
            fail(64, "--learning_rate -1.0: must be above 0", "--lora_r 0: must be above 0")
        *_, first, second, border = self.launchers_report(path).splitlines()
        assert first == "  traceback : error: --learning_rate -1.0: must be above 0"
        assert second.strip() == "error: --lora_r 0: must be above 0" and set(border) == {"="}

    def test_so_it_does_after_a_stop_and_after_an_exception(self, folder, errors, exits, capsys):
        path = errors(0)
        with pytest.raises(SystemExit, match="75"):
            end_all_ranks(alone(1), 75, "Stopped and saved after step 3 of 9")
        assert "traceback : Stopped and saved after step 3 of 9\n" in self.launchers_report(path)
        path = errors(1)
        process_status().state = "starting"
        path.parent.parent.joinpath("0", "error.json").unlink()
        with pytest.raises(Exit):
            Watch(str(folder)).on_exception(ValueError, ValueError("odd"), None)
        assert exits == [1] and "traceback : error: ValueError: odd\n" in self.launchers_report(
            path
        )

    def test_what_an_earlier_run_told_is_not_of_this_one(self, folder):
        failed = {"state": "failed", "exit_code": 70, "time": "2026-01-01 00:00:00"}
        (folder / "status.json").write_text(json.dumps(failed))
        process_status().began = "2026-01-01 00:00:01"
        assert process_status().reported_by_others() is None
        process_status().began = "2026-01-01 00:00:00"
        assert process_status().reported_by_others() == Ending("failed", 70)

    @pytest.mark.parametrize("there_is_a_folder", [True, False])
    def test_a_rank_that_is_ended_after_another_has_failed_says_nothing(
        self, there_is_a_folder, folder, errors, exits, capsys
    ):
        if not there_is_a_folder:
            process_status().output_dir = folder / "none"
        errors(0)
        with pytest.raises(SystemExit):
            fail(64, "no such argument")
        path = errors(1)
        process_status().state = "starting"
        capsys.readouterr()
        with pytest.raises(Exit):
            Watch(str(folder)).on_signal(signal.SIGTERM, None)
        assert exits == [64] and capsys.readouterr() == ("", "")
        failures = {rank: ProcessFailure(rank, 7, 64, str(errors(rank))) for rank in (1, 0)}
        others, root = ChildFailedError("llama.py", failures).format_msg().split("Root Cause")
        assert "traceback : error: no such argument\n" in root and path.exists()
        assert "traceback : ended by the launcher, since another rank had ended\n" in others
        if there_is_a_folder:
            assert read_json(folder / "status.json")["exit_code"] == 64

    @pytest.mark.parametrize("killed", [True, False])
    def test_after_a_rank_that_was_killed_it_does_not_say_to_repeat_the_call(
        self, killed, folder, errors, exits, capsys
    ):
        errors(0)
        peer = subprocess.Popen(["sleep", "60"])
        ours = Watch(str(folder))
        ours.peers = {os.pidfd_open(peer.pid): (1, peer.pid)}
        if killed:
            peer.kill()
            peer.wait()
        with pytest.raises(Exit):
            ours.on_signal(signal.SIGTERM, None)
        said = capsys.readouterr()
        peer.kill()
        assert exits == [1 if killed else 75] and ("run the same command" in said.out) != killed
        assert (f"error: rank 1 (process {peer.pid}) is gone" in said.err) == killed

    def test_a_rank_that_is_ended_by_a_person_names_the_signal(self, folder, errors, exits, capsys):
        path = errors(0)
        with pytest.raises(Exit):
            Watch(str(folder)).on_signal(signal.SIGTERM, None)
        says = "Stopped by SIGTERM before the first step: run the same command again"
        assert exits == [75] and capsys.readouterr().out == says + "\n"
        assert f"traceback : {says}\n" in self.launchers_report(path)


@pytest.mark.parametrize(("path", "code"), [("run/metrics.jsonl", 73), ("rows.jsonl", 1)])
def test_an_error_of_a_file_in_it_is_73_later_too(path, code, folder, exits, capsys):
    error = IsADirectoryError(21, "Is a directory", str(folder / path))
    with pytest.raises(Exit):
        Watch(str(folder / "run")).on_exception(IsADirectoryError, error, None)
    told = capsys.readouterr().err.startswith("error: cannot read or write: ")
    assert exits == [code] and told == (code == 73)
