# SPDX-License-Identifier: Apache-2.0
"""A run beside other work is noticed: on a CPU by its load, on a GPU by another process there."""

import pytest

from bench import idle
from bench.idle import Use


@pytest.fixture(autouse=True)
def high_load(monkeypatch):
    monkeypatch.setattr(idle.os, "getloadavg", lambda: (40.0, 40.0, 40.0))


def test_a_gpu_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(idle, "wait_until_idle", lambda: pytest.fail("it waits for the host"))
    monkeypatch.setattr(idle.machine, "gpu_processes", list)
    assert idle.use_before("cuda") == Use(40.0, False)
    assert idle.use_after("cuda", ranks=1) == Use(40.0, False)


def test_another_process_on_the_gpu_disturbs_a_run(monkeypatch):
    monkeypatch.setattr(idle.machine, "gpu_processes", lambda: [4711])
    assert idle.gpu_is_busy(patience=0)
    monkeypatch.setattr(idle, "gpu_is_busy", lambda: True)
    assert idle.use_before("cuda") == Use(40.0, True)


def test_a_cpu_that_does_something_else_disturbs_a_run(monkeypatch):
    assert idle.use_after("cpu", ranks=1) == Use(40.0, True)
    monkeypatch.setattr(idle, "wait_until_idle", lambda: 0.3)
    assert idle.use_before("cpu") == Use(0.3, False)
    monkeypatch.setattr(idle.os, "getloadavg", lambda: (2.5, 2.0, 2.0))
    assert idle.use_after("cpu", ranks=1) == Use(2.5, True)
    assert idle.use_after("cpu", ranks=2) == Use(2.5, False)  # the second rank is its own


def test_waiting_ends_with_the_patience():
    assert idle.wait_until_idle(patience=0) == 40.0
