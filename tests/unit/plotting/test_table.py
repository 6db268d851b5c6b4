# SPDX-License-Identifier: Apache-2.0
"""The table and the JSON have the numbers by which runs are compared."""

import json
import re

import pytest

from plotting.table import Best, as_json, best_of, rows_of, table, time_text
from recorded_runs import recorded

EVALUATIONS = [
    {"step": 2, "eval_loss": 3.0, "eval_perplexity": 20.0, "eval_exact_match": 0.25},
    {"step": 4, "eval_loss": 2.0, "eval_perplexity": 7.0, "eval_exact_match": 0.75},
    {"step": 6, "eval_loss": 2.5, "eval_perplexity": 12.0, "eval_exact_match": None},
]


def test_the_best_is_the_smallest_loss_and_the_largest_share():
    run = recorded(evaluations=EVALUATIONS)
    assert best_of(run, "eval_loss") == Best(2.0, 4)
    assert best_of(run, "eval_exact_match") == Best(0.75, 4)
    assert best_of(run, "eval_f1") is None


def test_a_row_has_the_numbers_of_its_run():
    losses = [4.0] * 38 + [3.0, 1.0]  # the last twentieth is two steps
    (row,) = rows_of([recorded(losses, evaluations=EVALUATIONS[:1])])
    assert row.steps == 40 and row.final_loss == 2.0
    assert row.mean_speed == pytest.approx(100) and row.speed == "tokens_per_second"
    assert row.peak_memory_gib == 2.5 and row.seconds == pytest.approx(40)


def test_the_table_is_aligned_and_says_in_what_runs_differ():
    first = recorded([4.0] * 20, "x/first", EVALUATIONS, learning_rate=1e-3, seed=1)
    second = recorded([3.0] * 20, "x/b", learning_rate=2e-3, seed=1)
    *rows, empty, head, of_first, of_second = table([first, second])
    assert len({len(row) for row in rows}) == 1
    cells = [re.split("  +", row) for row in rows]
    assert cells[0][:4] == ["run", "steps", "final loss", "best eval_loss"]
    assert cells[0][4:] == ["best eval_exact_match", "tokens/s", "peak GiB", "time"]
    assert cells[1] == ["first", "20", "4", "2 at 4", "0.75 at 4", "100", "2.50", "20.0 s"]
    assert cells[2] == ["b", "20", "3", "-", "-", "100", "2.50", "20.0 s"]
    assert (empty, head) == ("", "In what they differ:")
    assert of_first == "  first: learning_rate=0.001"
    assert of_second == "  b: learning_rate=0.002"


def test_a_column_that_no_run_has_is_left_out():
    runs = [recorded(folder="a"), recorded(folder="b")]
    for run in runs:
        for line in run.steps:
            del line["peak_memory_gib"], line["elapsed_seconds"]
    assert table(runs)[0] == "run  steps  final loss"


def test_the_json_can_be_read_by_programs_that_know_no_nan():
    runs = [recorded([float("nan")], evaluations=EVALUATIONS), recorded(seed=1)]
    text = json.dumps(as_json(runs), allow_nan=False)
    first, _ = json.loads(text)["runs"]
    assert first["final_loss"] is None and first["best"]["eval_loss"] == {"value": 2.0, "step": 4}


@pytest.mark.parametrize(
    ("seconds", "text"), [(5.04, "5.0 s"), (600, "10.0 min"), (9000, "2.5 h"), (None, "-")]
)
def test_a_duration_is_in_the_unit_that_fits(seconds, text):
    assert time_text(seconds) == text
