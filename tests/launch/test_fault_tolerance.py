"""The short form of scripts/fault_injection.py: no fault loses a run, under each engine once.

For each engine one run that nothing stopped leaves its checkpoints. The others start from a copy of the one of step 7,
meet their fault, go on by the same command, and have to end with the same lines of metrics.jsonl and final weights.
"""

import shutil

import fault_injection as fi
import pytest
from launching import starting_cold

SAVES = ("--save_steps", "7", "--save_total_limit", "9")
INT8 = (*SAVES, "--use_peft", "--load_in_8bit")
NAN = ("--save_steps", "1", "--save_total_limit", "30", "--nonfinite", "skip")


@pytest.fixture(scope="session")
def lab(tiny, shared_tmp):
    return fi.Lab(shared_tmp / "faults", tiny)


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
    check(fi.not_finite_at_first(fi.job("single"))(lab, tmp_path))


@pytest.mark.cold("processes are found by their environment in /proc")
def test_a_signal_to_the_group_leaves_the_loaders_of_data_alone(lab, tmp_path):
    check(fi.signal_a_group(fi.job("single"), "SIGTERM")(lab, tmp_path))


@pytest.mark.cold("processes are found by their environment in /proc")
def test_a_signal_to_a_group_that_tokenises_stops_it(lab, tmp_path):
    check(fi.signal_a_group_that_tokenises("SIGTERM")(lab, tmp_path))


def test_one_process_goes_on_after_a_crash_in_a_save(lab, tmp_path):
    fault = {"do": "crash at change", "change": 12, "at": "publish", "call": 2}
    check(fi.save_in_danger(fault, -fi.signal.SIGKILL, "change 12")(lab, tmp_path))


def test_one_process_goes_on_after_a_full_disk(lab, tmp_path):
    if not fi.can_mount():
        pytest.skip("no file system can be mounted here")
    check(fi.fill_the_disk(2)(lab, tmp_path / "kept"))


@pytest.mark.parametrize(("config", "ranks"), [("fsdp2_full_shard", 2), ("deepspeed_zero3", 3)])
def test_what_is_lost_is_computed_again(config, ranks, lab, tmp_path):
    job = fi.job(config, ranks)  # 3: ZeRO-3 pads the last parts
    whole = lab.whole(job, flags=SAVES)
    check(fi.goes_on(lab, job, lost_after(7, whole, tmp_path / "run"), whole=whole))


def test_adapters_of_an_int8_base_go_on(lab, tmp_path):
    job = fi.job("ddp")
    whole = lab.whole(job, flags=INT8)
    check(fi.goes_on(lab, job, lost_after(7, whole, tmp_path / "run"), flags=INT8, whole=whole))


def test_a_signal_to_one_rank_in_evaluation_stops_all_and_saves(lab, tmp_path):
    job = fi.job("ddp")
    whole = lab.whole(job, flags=SAVES)
    check(
        fi.signal_and_go_on(job, "SIGTERM", 1, "evaluation", whole)(
            lab, lost_after(7, whole, tmp_path / "run")
        )
    )


def test_a_stopped_rank_ends_all_with_their_stacks(lab, tmp_path):
    job = fi.job("fsdp1_full_shard")
    whole, folder = lab.whole(job, flags=SAVES), tmp_path / "run"
    lose = fi.lose_a_rank(
        job, 1, {"at": "summed_loss", "step": 9}, ("--ddp_timeout", "10"), stopped=True
    )
    with starting_cold():
        check(lose(lab, lost_after(7, whole, folder)))
    check(fi.goes_on(lab, job, folder, whole=whole))


def test_a_nan_changes_nothing_and_a_killed_rank_ends_all(lab, tmp_path):
    job, folder = fi.job("deepspeed_zero2"), tmp_path / "run"
    fault = {"do": "nan", "at": "summed_loss", "row": fi.row_of_step(9)}
    whole = lab.whole(job, [fault], NAN)
    assert fi.hash_of_state(whole, 9) == fi.hash_of_state(whole, 8) != fi.hash_of_state(whole, 10)
    assert fi.nonfinite_weights(whole) == [] and len(fi.verified(whole)) == fi.STEPS
    with starting_cold():
        check(
            fi.lose_a_rank(job, 1, {"at": "summed_loss", "step": 12}, NAN)(
                lab, lost_after(10, whole, folder)
            )
        )
    check(fi.goes_on(lab, job, folder, flags=NAN, whole=whole))


def test_another_strategy_on_another_number_of_ranks_goes_on(lab, tmp_path):
    whole = lab.whole(fi.job("ddp"), flags=SAVES)
    folder = lost_after(7, whole, tmp_path / "run")
    done = lab.run(fi.job("fsdp2_full_shard", 3), folder)
    assert done.code == 0, done.output[-3000:]
    assert f"Going on from {folder / 'checkpoint-7'}, made with DDP on 2 ranks" in done.output
    assert fi.apart(folder, whole) <= 1e-4
