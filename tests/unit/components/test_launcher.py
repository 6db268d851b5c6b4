# SPDX-License-Identifier: Apache-2.0
"""A launcher that the network blocks does not keep its host."""

import subprocess

import pytest

from components import launcher
from components.launcher import end_blocked_launcher


@pytest.mark.parametrize(("restarts", "is_killed"), [("0", True), ("100", False)])
def test_a_blocked_launcher_is_killed_unless_it_may_restart(restarts, is_killed, monkeypatch):
    torchrun = subprocess.Popen(["sleep", "60"])
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", restarts)
    monkeypatch.setattr(launcher, "SECONDS_FOR_LAUNCHER", 0)
    monkeypatch.setattr(launcher.os, "getppid", lambda: torchrun.pid)
    killers = []
    start = subprocess.Popen
    monkeypatch.setattr(
        launcher.subprocess, "Popen", lambda *a, **k: killers.append(start(*a, **k))
    )
    try:
        end_blocked_launcher()
        assert [killer.wait(60) for killer in killers] == [0] * is_killed
        if is_killed:
            torchrun.wait(10)
        assert (torchrun.poll() is None) != is_killed
    finally:
        torchrun.kill()
        torchrun.wait()
