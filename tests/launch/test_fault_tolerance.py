# SPDX-License-Identifier: Apache-2.0
"""The short form of evidence/fault_injection.py: no fault loses a run, under each engine once.

For each engine one run that nothing stopped leaves its checkpoints. The others start from a copy of
the one of step 7, meet their fault, are resumed by the same command, and have to end with the same
lines of metrics.jsonl and final weights.
"""

import os
import shutil
import signal
import time

import pytest

from components.checkpoint import read_progress
from components.folder_lock import NAME, FolderLock
from components.status import HOST
from exits import Exit
from launching import starting_cold
from proof.faults import Fault
from proof.trials import nonfinite, signals, writes
from proof.trials.dead_ranks import Place, kill_a_rank, kill_the_launcher, stop_a_rank
from proof.trials.lab import Lab
from proof.trials.outcome import (
    difference_in_loss,
    hash_of_state,
    last_step,
    nonfinite_weights,
    resume_and_compare,
    unequal,
    verified,
)
from proof.trials.trial import STEPS, make_job

LONG = 200  # seconds, within the time that a launch has
SAVES = ("--save_steps", "7", "--save_total_limit", "9")
INT8 = (*SAVES, "--use_peft", "--load_in_8bit")
ONLY_MODEL = ("--save_only_model", "--save_steps", "1", "--save_total_limit", "30")
NAN = ("--save_steps", "1", "--save_total_limit", "30", "--nonfinite", "skip")


@pytest.fixture(scope="session")
def lab(tiny, shared_tmp):
    return Lab(shared_tmp / "faults", tiny)


def lost_after(step, whole, folder):
    """A copy of a run as if all after this step were lost, but for the lines of metrics.jsonl."""
    folder.mkdir(parents=True)
    shutil.copytree(whole / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    (folder / "latest").write_text(f"checkpoint-{step}")
    shutil.copy(whole / "metrics.jsonl", folder)
    return folder


def check(result):
    assert result.ok, result.note


def test_one_process_goes_on_after_two_signals_one_before_the_first_update(lab, tmp_path):
    check(nonfinite.skip_the_first_step(lab, tmp_path, make_job("single")))


@pytest.mark.cold("processes are found by their environment in /proc")
def test_a_signal_to_the_group_leaves_the_loaders_of_data_alone(lab, tmp_path):
    check(signals.stop_a_group_with_loaders(lab, tmp_path, make_job("single"), "SIGTERM"))


@pytest.mark.cold("processes are found by their environment in /proc")
def test_a_signal_to_a_group_that_tokenises_stops_it(lab, tmp_path):
    check(signals.stop_a_group_that_tokenizes(lab, tmp_path, "SIGTERM"))


def test_one_process_goes_on_after_a_crash_in_a_save(lab, tmp_path):
    fault = Fault("crash at change", "save", call=2, change=12)
    check(writes.save_in_danger(lab, tmp_path, fault, -signal.SIGKILL, "change 12"))


def test_one_process_goes_on_after_a_kill_beside_a_save_in_the_background(lab, tmp_path):
    check(writes.kill_beside_a_save(lab, tmp_path))


# One of each way in which a share is gathered
@pytest.mark.parametrize(
    ("config", "ranks"),
    [
        ("single", 1),
        ("ddp", 2),
        ("fsdp1_full_shard", 2),
        ("fsdp2_full_shard", 2),
        ("deepspeed_zero2", 2),
        ("deepspeed_zero3", 3),
    ],
)
def test_steps_beside_a_save_change_no_bit_of_it(config, ranks, lab, tmp_path):
    """No rank begins to write its share before two further steps have changed the weights."""
    job = make_job(config, ranks)
    whole = lab.uninterrupted(job, flags=SAVES)
    folder = tmp_path / "run"
    waits = [tmp_path / f"rank {rank} waits" for rank in range(ranks)]
    faults = []
    for rank, file in enumerate(waits):
        faults.append(Fault("wait", "write_share", rank=rank, file=file, seconds=LONG))
    launch = lab.start(job, folder, faults, flags=(*SAVES, "--async_save"))
    while last_step(folder) < 9 and launch.is_running():
        time.sleep(0.1)
    staged = folder / "checkpoint-7.staging"
    is_written_late = staged.is_dir() and not list(staged.glob("state*"))
    for file in waits:
        file.unlink(missing_ok=True)
    ended = launch.end()
    assert ended.code == 0 and is_written_late, ended.output[-3000:]
    assert states_of(folder) == states_of(whole)
    assert unequal(folder, whole) == 0


def states_of(folder):
    """{step: sizes and hashes of the state's files} of the checkpoints that can be trusted."""
    states = {step: hash_of_state(folder, step) for step in verified(folder)}
    assert list(states) == [20, 14, 7]
    return states


def test_one_process_goes_on_after_a_full_disk(lab, tmp_path):
    if not writes.can_mount():
        pytest.skip("no file system can be mounted here")
    check(writes.fill_the_disk(lab, tmp_path / "kept", quarter=2))


@pytest.mark.parametrize(
    ("config", "ranks"), [("fsdp2_full_shard", 2), ("deepspeed_zero3", 3), ("ddp", 3)]
)
def test_what_is_lost_is_computed_again(config, ranks, lab, tmp_path):
    # On three ranks ZeRO-3 pads the last parts, and under DDP the order of sums could differ.
    job = make_job(config, ranks)
    whole = lab.uninterrupted(job, flags=SAVES)
    folder = lost_after(7, whole, tmp_path / "run")
    check(resume_and_compare(lab, folder, job, whole=whole))


def test_a_second_run_in_the_folder_of_a_first_one_ends_and_changes_nothing(lab, tmp_path):
    job = make_job("ddp")
    whole = lab.uninterrupted(job, flags=SAVES)
    folder = shutil.copytree(whole, tmp_path / "run")
    (folder / "checkpoint-20.staging").mkdir()  # as while the first one saves
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    first = FolderLock(folder)
    assert first.take() is None
    second = lab.run(job, folder, flags=SAVES)
    assert second.code == Exit.USAGE, second.output[-3000:]
    assert f"process {os.getpid()} on {HOST} is writing there" in second.output
    assert (folder / "checkpoint-20.staging").is_dir()
    (folder / NAME).unlink()
    files.pop(folder / NAME, None)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_adapters_of_an_int8_base_go_on(lab, tmp_path):
    job = make_job("ddp")
    whole = lab.uninterrupted(job, flags=INT8)
    folder = lost_after(7, whole, tmp_path / "run")
    check(resume_and_compare(lab, folder, job, flags=INT8, whole=whole))


def test_a_signal_to_one_rank_in_evaluation_stops_all_and_saves(lab, tmp_path):
    job = make_job("ddp")
    whole = lab.uninterrupted(job, flags=SAVES)
    folder = lost_after(7, whole, tmp_path / "run")
    check(signals.stop_by_signal(lab, folder, job, "SIGTERM", 1, "evaluation", whole))


@pytest.mark.cold("a warm process has another parent")
def test_ranks_whose_launcher_is_killed_save_and_stop(lab, tmp_path):
    job = make_job("ddp")
    whole = lab.uninterrupted(job, flags=SAVES)
    check(kill_the_launcher(lab, tmp_path / "run", job, SAVES, whole))


def test_a_stopped_rank_ends_all_with_their_stacks(lab, tmp_path):
    job = make_job("fsdp1_full_shard")
    whole = lab.uninterrupted(job, flags=SAVES)
    folder = lost_after(7, whole, tmp_path / "run")
    place = Place("summed_loss", step=9)
    with starting_cold():
        check(stop_a_rank(lab, folder, job, 1, place))
    check(resume_and_compare(lab, folder, job, whole=whole))


def test_a_nan_changes_nothing_and_a_killed_rank_ends_all(lab, tmp_path):
    job = make_job("deepspeed_zero2")
    nan = Fault("nan", "summed_loss", row=nonfinite.row_of_step(9))
    whole = lab.uninterrupted(job, [nan], NAN)
    assert hash_of_state(whole, 9) == hash_of_state(whole, 8) != hash_of_state(whole, 10)
    assert nonfinite_weights(whole) == [] and len(verified(whole)) == STEPS
    folder = lost_after(10, whole, tmp_path / "run")
    place = Place("summed_loss", step=12)
    with starting_cold():
        check(kill_a_rank(lab, folder, job, 1, place, NAN))
    check(resume_and_compare(lab, folder, job, flags=NAN, whole=whole))


@pytest.mark.parametrize(
    ("fault", "code", "saved"),
    [
        (Fault("nan", "summed_loss", row=nonfinite.row_of_step(9)), Exit.NOT_FINITE, 8),
        (Fault("SIGTERM", "save", call=8, after=True), Exit.STOPPED, 9),
    ],
    ids=["a NaN in the next step", "a signal after the save"],
)
def test_a_run_that_ends_after_a_checkpoint_of_the_model_alone_goes_on(
    fault, code, saved, lab, tmp_path
):
    job = make_job("single")
    folder = tmp_path / "run"
    ended = lab.run(job, folder, [fault], flags=ONLY_MODEL)
    assert ended.code == code, ended.output[-3000:]
    is_only_model = {}
    for step in verified(folder):
        is_only_model[step] = read_progress(folder / f"checkpoint-{step}")["only_model"]
    assert is_only_model == {step: step != saved for step in range(1, saved + 1)}
    check(resume_and_compare(lab, folder, job, flags=ONLY_MODEL))


def test_another_strategy_on_another_number_of_ranks_goes_on(lab, tmp_path):
    whole = lab.uninterrupted(make_job("ddp"), flags=SAVES)
    folder = lost_after(7, whole, tmp_path / "run")
    ended = lab.run(make_job("fsdp2_full_shard", 3), folder)
    assert ended.code == 0, ended.output[-3000:]
    assert f"Continuing from {folder / 'checkpoint-7'}, made with DDP on 2 ranks" in ended.output
    assert difference_in_loss(folder, whole) <= 1e-4


def test_a_weight_that_is_not_finite_is_never_saved(lab, tmp_path):
    """Loss and gradient of the step are finite, and so it is applied: its rate is beyond fp32."""
    flags = ("--save_steps", "1", "--learning_rate", "1e39", "--warmup_steps", "0")
    ended = lab.run(make_job("ddp"), tmp_path, [], flags=flags)
    assert ended.code == Exit.NOT_FINITE
    assert "is not finite after step 1: no checkpoint is made" in ended.output
    assert verified(tmp_path) == []
    assert not (tmp_path / "model.safetensors").exists()
