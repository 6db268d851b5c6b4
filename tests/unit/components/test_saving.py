# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is written by the threads of all ranks, and is whole once all of them are done."""

import errno
import threading
import time
from datetime import timedelta
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator

from components import checkpoint, long_calls, saving
from components.exits import Exit
from components.object_store import ObjectStore
from components.saving import Saver
from components.state import gather_state
from components.watch import Watch
from components.write_errors import CURES, WriteError
from fakes import fake_accelerator
from object_memory import URL
from proof.damage import make_checkpoint
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


def test_finishing_waits_for_it(saver, held_back, tmp_path):
    start(saver, 3)
    threading.Timer(0.1, held_back.set).start()
    assert saver.finish(fake_accelerator()) is None
    assert checkpoint.find_damage(tmp_path / "checkpoint-3") is None


def test_without_one_under_way_nothing_is_waited_for(saver):
    assert saver.finish(fake_accelerator()) is None
    assert saver.advance(fake_accelerator(), saver.vote()) is None


def test_votes_of_an_earlier_phase_do_not_end_a_later_one(saver, held_back):
    """On a GPU the sums are those of the votes one step before."""
    accelerator = fake_accelerator()
    held_back.set()
    start(saver, 3)
    advance_until_done(saver, accelerator)
    earlier = saver.vote()
    held_back.clear()
    start(saver, 6)
    assert saver.advance(accelerator, earlier) is None
    assert saver._pending.phase == saving.Phase.WRITING


def test_what_it_records_is_the_progress_of_its_own_step(saver, held_back, tmp_path):
    progress = {"step": 3, "position": {"row": 7}}
    saver.start(fake_accelerator(), {"weight": torch.ones(2)}, progress)
    progress["position"]["row"] = 8
    held_back.set()
    saver.finish(fake_accelerator())
    found = checkpoint.read_progress(tmp_path / "checkpoint-3")
    assert found == {"step": 3, "position": {"row": 7}}


def test_old_checkpoints_are_deleted_once_the_new_one_is_whole(tmp_path, held_back):
    saver = Saver(tmp_path, limit=1, store=None, show_life=do_nothing)
    held_back.set()
    start(saver, 3)
    saver.finish(fake_accelerator())
    held_back.clear()
    start(saver, 6)
    assert [*checkpoint.checkpoints_in(tmp_path)] == [3]
    held_back.set()
    saver.finish(fake_accelerator())
    assert [*checkpoint.checkpoints_in(tmp_path)] == [6]


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


def test_a_weight_that_is_not_finite_is_found_before_the_run_goes_on(saver, tmp_path):
    share = {"weight": torch.tensor([1.0, float("nan")])}
    code, why = saver.start(fake_accelerator(), share, {"step": 3})
    assert code == Exit.NOT_FINITE and "weight is not finite after step 3" in why
    assert saver.vote() == (0, 0) and not any(tmp_path.iterdir())


def test_saves_do_not_wait_for_an_upload_whose_checkpoint_is_kept(tmp_path, monkeypatch):
    event = threading.Event()
    begun = threading.Event()

    def upload(self, path, limit, kept_step):
        begun.set()
        event.wait(60)
        uploaded.append(path.name)

    uploaded = []
    monkeypatch.setattr(ObjectStore, "_upload_checkpoint", upload)
    saver = Saver(tmp_path, limit=1, store=ObjectStore(URL, tmp_path), show_life=do_nothing)
    for step in (3, 6, 9):
        start(saver, step)
        saver.finish(fake_accelerator())
        assert begun.wait(60)
    # The first is being uploaded, the second was skipped, and the third comes next.
    assert [*checkpoint.checkpoints_in(tmp_path)] == [9, 3]
    event.set()
    assert saver.finish_uploads(is_done=False) is None
    assert uploaded == ["checkpoint-3", "checkpoint-9"]
    assert [*checkpoint.checkpoints_in(tmp_path)] == [9]


def test_the_best_checkpoint_of_an_earlier_call_is_kept_though_nothing_is_saved(tmp_path):
    """The call resumes, and is stopped before its first save."""
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step, limit=3)
    saver = Saver(tmp_path, limit=1, store=ObjectStore(URL, tmp_path), show_life=do_nothing)
    saver.keep(2)
    assert saver.finish_uploads(is_done=False) is None
    assert [*checkpoint.checkpoints_in(tmp_path)] == [6, 2]


def test_an_upload_that_failed_is_a_warning(tmp_path, monkeypatch, capsys):
    def fail(*arguments):
        raise ConnectionError("cut")

    monkeypatch.setattr(ObjectStore, "_upload_checkpoint", fail)
    store = ObjectStore(URL, tmp_path)
    store.start_upload(tmp_path / "checkpoint-3", limit=1)
    assert store.upload_the_rest(is_done=False) is None
    assert capsys.readouterr().err.startswith(f"warning: checkpoint-3 is only in {tmp_path}: ")


# ---- Slow disks ----
@pytest.fixture
def signs_of_life(monkeypatch):
    """When they were shown."""
    monkeypatch.setattr(long_calls, "SECONDS_BETWEEN_WORDS", 0.01)
    return []


@pytest.fixture
def slow_save(tmp_path, held_back, signs_of_life):
    """A function that saves 2 MB, which takes 0.5 seconds."""

    def save():
        show_life = partial(signs_of_life.append, 1)
        saver = Saver(tmp_path, limit=2, store=None, show_life=show_life)
        start(saver, 3)
        threading.Timer(0.5, held_back.set).start()
        return saver.finish(fake_accelerator())

    return save


def test_a_rank_that_waits_for_a_slow_disk_does_not_seem_to_hang(
    slow_save, signs_of_life, monkeypatch
):
    monkeypatch.setattr(saving, "SLOWEST_DISK", 1_000)
    assert slow_save() is None
    assert len(signs_of_life) > 10


def test_a_rank_whose_disk_does_not_answer_seems_to_hang(slow_save, signs_of_life, monkeypatch):
    monkeypatch.setattr(saving, "SLOWEST_DISK", 1e12)
    assert slow_save() is None
    assert len(signs_of_life) == 0


# ---- Several ranks ----
def test_a_save_may_take_longer_than_a_collective_call(tmp_path):
    limit = 2  # seconds

    def save():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=limit))
        long_calls.SECONDS_BETWEEN_WORDS = limit / 8
        saving.SLOWEST_DISK = 1_000
        accelerator = Accelerator()
        event = threading.Event()
        if accelerator.process_index == 1:
            saving.write_share = after(event)
            threading.Timer(3 * limit, event.set).start()
        watch = Watch("runs")
        saver = Saver(tmp_path, limit=2, store=None, show_life=watch.show_life)
        start(saver, 3, accelerator)
        problem = saver.finish(accelerator)
        return problem, time.monotonic() - watch.sign_of_life < limit

    assert on_ranks(save, 2) == [(None, True), (None, True)]
    assert checkpoint.find_damage(tmp_path / "checkpoint-3") is None


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


def test_if_one_rank_cannot_write_all_end_alike(tmp_path):
    def save():
        accelerator = Accelerator()
        if accelerator.process_index == 1:
            saving.write_share = lambda *arguments: ({}, WriteError("broken", errno.EIO))
        saver = Saver(tmp_path, limit=2, store=None, show_life=do_nothing)
        start(saver, 3, accelerator)
        code, why = advance_until_done(saver, accelerator)
        return int(code), why, saver.finish(accelerator)

    why = (
        f"the checkpoint after step 3 could not be finished: broken: {CURES[errno.EIO]}; older "
        "checkpoints, if there are any, were not touched"
    )
    expected = (73, why, None)
    assert on_ranks(save, 2) == [expected, expected]
    assert not any(tmp_path.iterdir())


def test_free_bytes_are_those_before_the_rest_of_the_checkpoint_is_deleted(tmp_path):
    def save():
        saving.write_share = lambda *arguments: ({}, WriteError("full", errno.ENOSPC))
        calls = []
        saving.WriteError.describe = lambda *arguments: calls.append("describe") or "full"
        saving.discard = lambda *arguments: calls.append("discard")
        accelerator = Accelerator()
        saver = Saver(tmp_path, limit=2, store=None, show_life=do_nothing)
        start(saver, 3, accelerator)
        advance_until_done(saver, accelerator)
        return calls

    assert on_ranks(save, 2) == [["describe", "discard"], ["describe"]]


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


def test_without_a_copy_the_state_of_a_process_on_the_host_is_its_own():
    """Why --async_save has to copy, and why saving takes no memory without it."""
    model, optimizer, _ = trained()
    state = gather_state(fake_accelerator(), model, optimizer)
    assert state["0.weight"].data_ptr() == model[0].weight.data_ptr()


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
