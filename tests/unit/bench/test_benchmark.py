# SPDX-License-Identifier: Apache-2.0
"""evidence/benchmark.py: a wrong call is one line, and results replace older ones of their cell."""

import json
import sys

import pytest

import benchmark
from measured_runs import cell_of, run_of


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cells", "nothing like it"],
        ["--cells", "("],
        ["--repeats", "0"],
        ["--steps", "1"],
        ["--device", "tpu"],
        ["--data", "missing"],
    ],
)
def test_a_wrong_call_is_one_line_and_64(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        benchmark.main()
    assert stopped.value.code == 64
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_steps_change_neither_a_pass_nor_a_first_step(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["benchmark.py", "--steps", "7"])
    steps = {cell.name: cell.steps for cell in benchmark.parse_args()[1].chosen}
    assert steps["matched, medium"] == steps["growth, length"] == 7
    assert steps["shipped, medium"] == 0
    assert steps["start, cold cache"] == 1


def test_results_of_a_cell_replace_older_ones_of_that_cell_only(tmp_path):
    path = tmp_path / "new" / "results.json"
    old = [cell_of(run_of("floor"), name=name) for name in ("one", "two")]
    for cell in old:
        benchmark.write_results(path, cell)
    again = cell_of(run_of("floor"), run_of("ours"), name="one")
    benchmark.write_results(path, again)
    assert json.loads(path.read_text()) == {"cells": [old[1], again]}


def test_a_run_that_was_only_disturbed_has_not_failed_its_gate():
    assert benchmark.passed_gate({"void": ""}) and benchmark.passed_gate({"void": "loaded"})
    assert not benchmark.passed_gate({"void": "failed"})
