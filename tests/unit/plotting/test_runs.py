# SPDX-License-Identifier: Apache-2.0
"""What a run has written is read, and what cannot be read is refused in one line."""

import json

import pytest

from plotting.runs import read_run
from recorded_runs import write_run


def test_steps_and_evaluations_are_told_apart(tmp_path):
    evaluation = {"step": 2, "eval_loss": 3.0}
    run = read_run(write_run(tmp_path / "run", [4.0, 2.0], [evaluation], {"data": "abc"}))
    assert [line["loss"] for line in run.steps] == [4.0, 2.0]
    assert run.evaluations == [evaluation] and run.facts == {"data": "abc"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "line 1: not a JSON object with a step"),
        ("[]", "line 1: not a JSON object with a step"),
        ('{"loss": 1.0}', "line 1: not a JSON object with a step"),
        ('{"step": 1, "loss": "low"}', "line 1: loss must be a number"),
        ('{"step": 1}', "no line with a loss"),
        ('{"step": 1, "loss": null}', "no line with a loss"),
        ("", "no line with a loss"),
    ],
)
def test_metrics_that_cannot_be_drawn_are_refused_with_65(text, problem, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(SystemExit) as ended:
        read_run(str(tmp_path))
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 65 and problem in line


def test_a_number_that_was_not_finite_is_none(tmp_path):
    folder = write_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 3, "loss": None}))
    assert read_run(folder).steps[-1] == {"step": 3, "loss": None}
