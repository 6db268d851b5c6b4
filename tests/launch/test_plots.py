# SPDX-License-Identifier: Apache-2.0
"""plot_loss.py draws a run or compares several, and refuses what it cannot draw."""

import json
import sys

import pytest

import plot_loss
from recorded_runs import write_run

EVALUATION = {"step": 2, "eval_loss": 3.0, "eval_accuracy": 0.5}


@pytest.fixture
def plotted(monkeypatch, capsys):
    """Call the command in this process; return its exit code, output and error lines."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["plot_loss.py", *map(str, words)])
        code = 0
        try:
            plot_loss.main()
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err.splitlines()

    return call


def test_several_runs_are_one_picture_a_table_and_json(tmp_path, plotted):
    facts = [{"arguments": {"seed": 1}}, {"arguments": {"seed": 2}}]
    first = write_run(tmp_path / "a", [4.0] * 9, [EVALUATION], facts[0])
    second = write_run(tmp_path / "b", [3.0] * 9, [], facts[1])
    code, out, err = plotted(first, second, "--json", tmp_path / "numbers.json")
    assert code == 0 and err == []
    assert out[0].startswith("run  steps  best eval_loss") and "  a: seed=1" in out
    assert out[-1] == f"{first}/comparison.png" and (tmp_path / "a" / "comparison.png").exists()
    runs = json.loads((tmp_path / "numbers.json").read_text())["runs"]
    assert [run["differs"] for run in runs] == [{"seed": 1}, {"seed": 2}]


def test_what_a_run_has_not_recorded_is_no_panel(tmp_path, plotted):
    run = write_run(tmp_path / "run")
    assert plotted(run, "--panels", "loss", "grad_norm") == (0, [f"{run}/loss.png"], [])


@pytest.mark.parametrize(
    ("words", "expected", "problem"),
    [
        (["RUN", "--panels", "f1"], 65, "no panel f1: no run has it"),
        (["RUN", "--output", "RUN/none/loss.png"], 73, "cannot write RUN/none/loss.png"),
    ],
)
def test_what_cannot_be_drawn_is_refused_in_one_line(words, expected, problem, tmp_path, plotted):
    run = write_run(tmp_path / "run")
    code, _, (line,) = plotted(*(word.replace("RUN", run) for word in words))
    assert code == expected and problem.replace("RUN", run) in line
