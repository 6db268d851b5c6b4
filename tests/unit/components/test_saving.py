# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is written by the threads of all ranks, and is whole once all of them are done."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator

from components import checkpoint, saving
from components.exits import Exit
from components.saving import Saver
from components.state import gather_state
from components.watch import Watch
from fakes import fake_accelerator
from ranks import on_ranks


def do_nothing():
    """Show no sign of life to anybody."""


@pytest.fixture
def saver(tmp_path):
    return Saver(tmp_path, limit=2, store=None, show_life=do_nothing)


@pytest.fixture
def held_back(monkeypatch):
    """An event for which the thread waits before it writes."""
    event = threading.Event()
    monkeypatch.setattr(saving, "write_share", after(event))
    yield event
    event.set()


def after(event):
    """The function that writes a share, once an event is set."""
    write_share = saving.write_share

    def wait_and_write(*arguments):
        event.wait()
        return write_share(*arguments)

    return wait_and_write


def start(saver, step, accelerator=None):
    accelerator = accelerator or fake_accelerator()
    share = {f"weight{accelerator.process_index}": torch.full((2**19,), float(step))}
    return saver.start(accelerator, share, {"step": step, "seen": [step]})


def advance_until_done(saver, accelerator):
    """Vote as between steps until no checkpoint is under way, and return the last problem."""
    watch = Watch("runs")
    problem = None
    while saver._pending is not None:
        _, *sums = watch.vote(accelerator, *saver.vote())
        problem = saver.advance(accelerator, sums)
        time.sleep(0.01)
    return problem


# ---- One process ----
def test_a_run_goes_on_while_its_checkpoint_is_written(saver, held_back, tmp_path):
    accelerator = fake_accelerator()
    assert start(saver, 3) is None
    assert saver.vote() == (0, 0) and saver.advance(accelerator, saver.vote()) is None
    assert checkpoint.checkpoints_in(tmp_path) == {}
    held_back.set()
    assert advance_until_done(saver, accelerator) is None
    assert checkpoint.find_damage(tmp_path / "checkpoint-3") is None


def test_what_it_records_is_the_progress_of_its_own_step(saver, held_back, tmp_path):
    progress = {"step": 3, "position": {"row": 7}}
    saver.start(fake_accelerator(), {"weight": torch.ones(2)}, progress)
    progress["position"]["row"] = 8
    held_back.set()
    saver.finish(fake_accelerator())
    found = checkpoint.read_progress(tmp_path / "checkpoint-3")
    assert found == {"step": 3, "position": {"row": 7}}


def test_a_write_that_fails_ends_the_run_at_the_next_vote(saver, tmp_path, monkeypatch):
    start(saver, 3)
    saver.finish(fake_accelerator())

    def refuse(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", refuse)
    start(saver, 6)
    while saver.vote() != (3, 1):
        time.sleep(0.01)
    code, why = saver.advance(fake_accelerator(), (3, 1))
    assert code == Exit.CANNOT_WRITE
    assert why.startswith("the checkpoint after step 6 could not be finished: No space left on")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-3"]
    assert saver.finish(fake_accelerator()) is None  # The ending of the run has nothing to wait for


# ---- Several ranks ----


def test_a_checkpoint_is_whole_once_the_slowest_rank_has_written(tmp_path):
    def save():
        accelerator = Accelerator()
        rank = accelerator.process_index
        event = threading.Event()
        if rank == 1:
            saving.write_share = after(event)
        saver = Saver(tmp_path, limit=2, store=None, show_life=do_nothing)
        watch = Watch("runs")
        begun = start(saver, 3, accelerator)
        early = []
        for _ in range(20):
            _, *sums = watch.vote(accelerator, *saver.vote())
            early.append(saver.advance(accelerator, sums))
        existed = (tmp_path / "checkpoint-3").exists()
        accelerator.wait_for_everyone()
        event.set()
        return begun, set(early), existed, advance_until_done(saver, accelerator)

    assert on_ranks(save, 2) == [(None, {None}, False, None)] * 2
    assert checkpoint.find_damage(tmp_path / "checkpoint-3") is None
    state = checkpoint.read_state(tmp_path / "checkpoint-3")
    assert sorted(state) == ["weight0", "weight1"]


# ---- Copies ----
def trained():
    """A model on the host after a step, and a function that does another."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.BatchNorm1d(128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step():
        model(torch.randn(4, 128)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    return model, SimpleNamespace(optimizer=optimizer), step


def test_a_copy_of_the_state_is_not_changed_by_the_steps_that_follow():
    model, optimizer, step = trained()
    copied = gather_state(fake_accelerator(), model, optimizer, copy=True)
    before = {name: tensor.clone() for name, tensor in copied.items()}
    step()
    assert all(torch.equal(copied[name], before[name]) for name in before)
    after_step = gather_state(fake_accelerator(), model, optimizer)
    changed = [name for name in before if not torch.equal(after_step[name], before[name])]
    assert changed == list(before)  # Each one would have been wrong


def test_the_bytes_are_those_that_a_waiting_run_writes(tmp_path):
    model, optimizer, _ = trained()
    for name, copy in (("waiting", False), ("background", True)):
        saver = Saver(tmp_path / name, limit=2, store=None, show_life=do_nothing)
        (tmp_path / name).mkdir()
        state = gather_state(fake_accelerator(), model, optimizer, copy=copy)
        saver.start(fake_accelerator(), state, {"step": 3})
        saver.finish(fake_accelerator())
    written = [path.name for path in (tmp_path / "waiting" / "checkpoint-3").iterdir()]
    assert sorted(written) == ["manifest.json", "progress.json", "state.safetensors"]
    for name in written:
        ours, theirs = (
            tmp_path / folder / "checkpoint-3" / name for folder in ("background", "waiting")
        )
        assert ours.read_bytes() == theirs.read_bytes()
