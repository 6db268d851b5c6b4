# SPDX-License-Identifier: Apache-2.0
"""A run counts only if it trained as the bare loop did."""

import math

import pytest

from bench.gates import judge
from measured_runs import run_of


def void(*runs, kind="matched", dtype="float32"):
    """Why the last run does not count."""
    return judge(runs, kind, dtype)[-1]["void"]


def test_equal_curves_count():
    judged = judge([run_of("floor"), run_of("ours", losses=(3.0, 2.0 + 9e-6))], "matched")
    assert [run["void"] for run in judged] == ["", ""]
    assert judged[1]["difference"] == pytest.approx(9e-6)
    assert "losses" not in judged[1]


@pytest.mark.parametrize(
    "losses", [(3.0, 2.00002), (3.0, math.nan), (3.0, None), (3.0,), (3.0, 2.0, 1.0)]
)
@pytest.mark.parametrize("kind", ["matched", "start"])
def test_another_curve_voids_a_run(losses, kind):
    assert void(run_of("floor"), run_of("ours", losses=losses), kind=kind)


def test_bf16_has_a_wider_bound():
    runs = [run_of("floor"), run_of("ours", losses=(3.0, 2.005))]
    assert void(*runs)
    assert not void(*runs, dtype="bfloat16")


@pytest.mark.parametrize("kind", ["matched", "shipped"])
def test_nothing_counts_without_the_bare_loop_of_the_same_repeat(kind):
    own = run_of("ours", held_out_loss=2.0)
    assert void(run_of("floor", repeat=1, held_out_loss=2.0), own, kind=kind)
    assert void({"contestant": "floor", "repeat": 0, "failed": "killed"}, own, kind=kind)


def test_the_loss_on_held_out_rows_decides_as_shipped():
    floor = run_of("floor", held_out_loss=2.0)
    assert not void(floor, run_of("ours", losses=(9.0, None), held_out_loss=2.039), kind="shipped")
    assert "2.1%" in void(floor, run_of("ours", held_out_loss=2.042), kind="shipped")
    assert void(floor, run_of("ours", held_out_loss=math.nan), kind="shipped")


def test_growth_needs_finite_losses():
    assert not void(run_of("1"), kind="growth")
    assert void(run_of("1", losses=(3.0, math.inf)), kind="growth")


def test_a_run_beside_other_work_and_one_that_failed_do_not_count():
    assert void(run_of("floor"), run_of("ours", loaded=True)) == "loaded"
    failed = {"contestant": "ours", "repeat": 0, "failed": "exit code 1"}
    assert void(run_of("floor"), failed) == "failed"


def test_a_run_that_learns_otherwise_beside_other_work_has_the_first_reason():
    assert "loss differs" in void(run_of("floor"), run_of("ours", losses=(3.0, 2.1), loaded=True))
