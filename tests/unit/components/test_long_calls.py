# SPDX-License-Identifier: Apache-2.0
"""Ranks wait for rank 0 longer than a collective call may take."""

import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from accelerate import Accelerator

from components import long_calls
from components.long_calls import call_on_every_rank, call_on_rank_0
from fakes import fake_accelerator
from ranks import on_ranks

LIMIT = 2  # seconds for which a collective call may wait


def work_longer_than_a_collective_call():
    time.sleep(3 * LIMIT)
    return "done"


def set_limit():
    """Give collective calls of this rank little time, as --ddp_timeout does."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT))


def test_work_may_take_longer_than_a_collective_call(monkeypatch):
    monkeypatch.setattr(long_calls, "SECONDS_BETWEEN_WORDS", LIMIT / 8)

    def wait_for_rank_0():
        set_limit()
        return call_on_rank_0(Accelerator(), work_longer_than_a_collective_call)

    assert on_ranks(wait_for_rank_0, 2) == ["done", "done"]


def test_work_of_each_rank_may_take_longer_than_a_collective_call(monkeypatch):
    monkeypatch.setattr(long_calls, "SECONDS_BETWEEN_WORDS", LIMIT / 8)

    def work():
        set_limit()
        accelerator = Accelerator()

        def work_long_on_rank_1():
            if accelerator.process_index == 1:
                work_longer_than_a_collective_call()
            return accelerator.process_index

        return call_on_every_rank(accelerator, work_long_on_rank_1)

    assert on_ranks(work, 2) == [[0, 1], [0, 1]]


def test_without_it_the_other_ranks_give_up():
    """The harm: what rank 0 does before it comes to a collective call."""

    def wait_for_rank_0():
        set_limit()
        accelerator = Accelerator()
        if accelerator.is_main_process:
            work_longer_than_a_collective_call()
        try:
            accelerator.wait_for_everyone()
        except RuntimeError as error:
            return str(error)
        return ""

    assert "Timed out" in on_ranks(wait_for_rank_0, 2)[1]


def test_what_ends_rank_0_is_raised():
    def end():
        raise SystemExit(65)

    with pytest.raises(SystemExit, match="65"):
        call_on_rank_0(fake_accelerator(), end)
