# SPDX-License-Identifier: Apache-2.0
"""plot_loss.py draws a run or compares several, and refuses what it cannot draw."""

import json

import pytest

import plot_loss
from plot_loss import read_run

EVALUATION = {"step": 2, "eval_loss": 3.0, "eval_accuracy": 0.5}


def lines_of(losses):
    """Lines of training steps of one call, a second and 100 tokens each."""
    lines = []
    for step, loss in enumerate(losses, 1):
        lines.append(
            {
                "step": step,
                "loss": loss,
                "learning_rate": 1e-3,
                "num_input_tokens_seen": step * 100,
                "tokens_per_second": 100.0,
                "elapsed_seconds": float(step),
                "peak_memory_gib": 2.5,
            }
        )
    return lines


def write_run(folder, losses=(4.0, 2.0), evaluations=()):
    """Write a run's files, and return its folder as a text."""
    folder.mkdir(parents=True)
    lines = [json.dumps(line) for line in [*lines_of(losses), *evaluations]]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return str(folder)


def test_several_runs_are_one_picture_and_a_table(tmp_path, in_process):
    first = write_run(tmp_path / "a", [4.0] * 9, [EVALUATION])
    second = write_run(tmp_path / "b", [3.0] * 9)
    done = in_process(plot_loss, first, second)
    assert done.code == 0 and done.err == ""
    out = [line.split() for line in done.out.splitlines()]
    assert out[1] == [first, "9", "4", "100.0", "2.5", "3", "at", "2", "0.5", "at", "2"]
    assert out[2] == [second, "9", "3", "100.0", "2.5", "-", "-"]
    assert out[-1] == [f"{first}/comparison.png"] and (tmp_path / "a" / "comparison.png").exists()


def test_what_a_run_has_not_recorded_is_no_panel_and_what_is_not_finite_in_no_curve(
    tmp_path, in_process
):
    run = write_run(tmp_path / "run")
    done = in_process(plot_loss, run, "--panels", "loss", "grad_norm")
    assert (done.code, done.out, done.err) == (0, f"{run}/loss.png\n", "")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "loss": null}')
    assert read_run(run).curve("loss") == ([1, 2], [4.0, 2.0])


def test_the_reward_of_a_run_that_has_one_is_a_panel(tmp_path):
    write_run(tmp_path / "run")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 3, "loss": 1.0, "learning_rate": 0.1, "reward": 0.5}\n')
    run = read_run(tmp_path / "run")
    assert plot_loss.wanted_panels(None, [run]) == ["loss", "reward", "learning_rate"]


@pytest.mark.parametrize(
    ("words", "expected", "problem"),
    [
        (["RUN", "--panels", "f1"], 65, "no panel f1: no run has it"),
        (["RUN", "--output", "RUN/none/loss.png"], 73, "cannot write RUN/none/loss.png"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(
    words, expected, problem, tmp_path, in_process
):
    run = write_run(tmp_path / "run")
    done = in_process(plot_loss, *(word.replace("RUN", run) for word in words))
    (line,) = done.err.splitlines()
    assert done.code == expected and problem.replace("RUN", run) in line
