# SPDX-License-Identifier: Apache-2.0
"""Launches of the GPU proof: what is left out, what went wrong, and how near two runs are."""

import time

import pytest

from conftest import pytest_report_header
from gpu import comparisons, launches
from gpu.cell import Outcome, Setup, relative_error
from gpu.launches import Trained, Variant


@pytest.fixture
def setup(tmp_path):
    return Setup("cpu", True, tmp_path, tmp_path, time.monotonic() + 99)


def steps(*losses, first=1):
    return [{"step": step, "loss": loss} for step, loss in enumerate(losses, first)]


def test_the_tests_start_without_packages_that_a_machine_may_lack(monkeypatch):
    versions = {"torch": "1.0"}
    monkeypatch.setattr(launches.machine, "version_of", versions.get)
    assert '"torch": "1.0"' in pytest_report_header()
    assert '"deepspeed": null' in pytest_report_header()


# ---- What is run ----


def test_a_variant_is_left_out_with_its_reason(setup, monkeypatch):
    monkeypatch.setattr(launches.machine, "version_of", lambda package: None)
    zero = Variant("zero", "deepspeed_zero2", flags=launches.adapters(setup, "nf4"))
    assert launches.reason_left_out(zero) == "not installed: deepspeed, bitsandbytes"
    paged = Variant("paged", flags=("--optim", "paged_adamw_8bit"))
    assert launches.reason_left_out(paged) == "not installed: bitsandbytes"
    trained = launches.train(setup, Variant("plain", left_out="it is refused"), setup.work)
    assert trained.why == "left out: it is refused"
    assert not comparisons.has_failed(trained)


def test_a_launch_without_time_is_not_started(setup):
    late = Setup("cpu", True, setup.output, setup.work, time.monotonic())
    trained = launches.train(late, Variant("plain"), setup.work)
    assert trained.why == "no time left"
    assert comparisons.has_failed(trained)


def test_words_of_a_command_line_are_flags():
    words = ["--packing", "--max_length", "16", "--use_peft"]
    assert launches.as_flags(words) == {"packing": True, "max_length": "16", "use_peft": True}


def test_the_error_of_a_launch_is_its_own_line():
    error_of = launches.error_of
    assert error_of("a\nerror: --dtype is wrong\nlast") == "error: --dtype is wrong"
    out_of_memory = "torch.OutOfMemoryError: CUDA"
    assert error_of(f"a\n{out_of_memory}\nlast\n") == out_of_memory
    assert error_of("a\nlast\n") == "last"
    assert error_of("") == "no output"


# ---- What it shows ----


def test_the_largest_difference_is_over_the_steps_that_were_logged():
    difference = comparisons.largest_difference(steps(2.0, 1.1), steps(2.0, 1.0))
    assert difference == pytest.approx(0.1)
    seldom = [{"step": 2, "loss": 1.0}, {"step": 4, "loss": 0.5}]
    assert comparisons.largest_difference(seldom, steps(3.0, 1.0, 0.7, 0.5)) == 0


@pytest.mark.parametrize("found", [[], steps(2.0), steps(2.0, None), steps(2.0, 1.0, 0.5)])
def test_a_missing_or_broken_step_is_no_agreement(found):
    assert comparisons.largest_difference(found, steps(2.0, 1.0)) == float("inf")


@pytest.mark.parametrize(
    ("value", "reference"), [(None, 1.0), (1.0, 0), (1.0, None), (float("nan"), 1.0)]
)
def test_nothing_is_near_a_missing_number(value, reference):
    assert relative_error(value, reference) == float("inf")


def test_a_loss_falls_if_its_last_steps_are_below_its_first():
    assert comparisons.falls([3.0, 2.9, 2.0, 1.9])
    assert not comparisons.falls([2.0, 2.1, 2.0, 2.1])
    assert not comparisons.falls([2.0])
    assert not comparisons.falls([2.0, None])


def trained(*losses, code=0, why=""):
    lines = [line | {"peak_memory_gib": 1.0} for line in steps(*losses)]
    return Trained(Variant("a variant"), code, why, steps=lines)


@pytest.mark.parametrize(
    ("other", "holds"),
    [
        (trained(2.0, 1.01), True),
        (trained(2.0, 1.1), False),
        (trained(2.0), False),
        (trained(code=1, why="exit code 1: it broke"), False),
        (trained(code=None, why="left out: needs a GPU"), True),
    ],
)
def test_variants_agree_if_every_one_that_ran_is_within_the_bound(other, holds):
    outcome = Outcome(ok=True)
    reference = trained(2.0, 1.0)
    comparisons.compare(outcome, [reference, other], reference)
    assert outcome.ok is holds
    assert len(outcome.rows) == len(outcome.commands) == 2
