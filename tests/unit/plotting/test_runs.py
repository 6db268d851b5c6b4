# SPDX-License-Identifier: Apache-2.0
"""Speed and time are those of training, also in a run that was resumed."""

import pytest

from plotting.picture import SPEED, curve_of
from plotting.runs import RecordedRun, calls_of, mean_speed, read_run, times_of
from recorded_runs import lines_of, write_run

LOSSES = [1.0] * 10


def resumed():
    """Ten steps of a second each, then ten more in a call whose steps took two seconds."""
    second = lines_of(LOSSES, first_step=11, seconds=2.0, before=1000)
    return RecordedRun("run", lines_of(LOSSES) + second, [], {})


def test_a_resumed_run_is_two_calls():
    first, second = calls_of(resumed())
    assert [line["step"] for line in first] == list(range(1, 11))
    assert [line["step"] for line in second] == list(range(11, 21))


def test_the_speed_is_that_between_logged_steps_of_a_call():
    steps, values = curve_of(resumed(), SPEED)
    assert steps == [*range(2, 11), *range(12, 21)]
    assert values == pytest.approx([100.0] * 9 + [50.0] * 9)


def test_the_time_of_evaluations_is_not_training():
    evaluations = [{"step": 0, "eval_loss": 1.0}, {"step": 6, "eval_loss": 1.0}]
    run = RecordedRun("run", lines_of(LOSSES), evaluations, {})
    for line in run.steps[6:]:
        line["elapsed_seconds"] += 1000
        line["tokens_per_second"] = line["num_input_tokens_seen"] / line["elapsed_seconds"]
    steps, values = curve_of(run, SPEED)
    assert steps == [2, 3, 4, 5, 6, 8, 9, 10]
    assert values == pytest.approx([100.0] * 8)
    assert mean_speed(run) == pytest.approx(100)
    assert times_of(run)[-1] == 1010


def test_the_mean_speed_is_without_the_first_steps_of_each_call():
    run = resumed()
    for start in (0, 10):  # five slow steps
        earlier = 0.0
        for number, line in enumerate(run.steps[start : start + 10]):
            before = (
                line["num_input_tokens_seen"]
                - line["tokens_per_second"] * (line["elapsed_seconds"])
            )
            earlier += 90 if number < 5 else 0
            line["elapsed_seconds"] += earlier
            line["tokens_per_second"] = (line["num_input_tokens_seen"] - before) / (
                line["elapsed_seconds"]
            )
    # Steps of a second and of two, 100 tokens each, in equal numbers
    assert mean_speed(run) == pytest.approx(100 / 1.5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nonsense", "line 1: "),
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


def test_a_loss_that_was_not_finite_is_in_no_curve(tmp_path):
    folder = write_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "loss": null}')
    assert read_run(folder).curve("loss") == ([1, 2], [4.0, 2.0])
