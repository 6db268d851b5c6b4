# SPDX-License-Identifier: Apache-2.0
"""Tables show what was measured, and no figure of a run that does not count."""

import json

from bench.models import MODELS
from bench.tables import as_text, block, details, line_of, whole_table
from measured_runs import cell_of, run_of


def cells_of(line):
    """The texts between the bars of a table's line."""
    return [text.strip() for text in line.split("|")[1:-1]]


def test_utilization_is_shown_in_both_conventions_where_rows_are_full():
    cell = cell_of(run_of("ours", tokens_per_second=10_000.0), kind="growth")
    cell |= {"models": {"8B": MODELS["8B"]}, "flags": {"ours": {"max_length": 4096}}}
    cell |= {"rows": "long", "device": "NVIDIA H200"}
    table = whole_table(cell)
    assert "| 52.0% | 48.8%" in table
    assert "| 515 " in table
    assert "MFU" not in whole_table(cell | {"rows": "gsm8k"})
    assert "MFU" not in whole_table(cell | {"device": "a CPU"})


def test_a_void_row_shows_no_figure():
    runs = [run_of("floor"), run_of("ours", seconds_per_step=1.25), run_of("trl")]
    runs.append(run_of("lean", seconds_per_step=0.8))
    runs.append(run_of("trainer", losses=(3.0, 2.1)))
    results = {"cells": [cell_of(*runs)]}
    line = next(line for line in block(results).splitlines() if "36M" in line)
    assert cells_of(line)[1:] == ["0.800", "1.250", "void", "1.000"]
    lines = details(results).splitlines()
    line = next(line for line in lines if line.startswith("| trainer"))
    assert "loss differs by 1.0e-01" in line
    assert "1,000" not in line


def test_the_table_of_tools_as_shipped_says_how_much_faster_ours_is():
    runs = [
        run_of("floor", held_out_loss=2.0),
        run_of("ours", held_out_loss=2.01, tokens_per_second=300.0),
        run_of("trainer", held_out_loss=2.0, tokens_per_second=200.0),
    ]
    runs.append(run_of("trl", held_out_loss=3.0))
    text = block({"cells": [cell_of(*runs, kind="shipped", name="shipped, medium")]})
    rows = {}
    for line in text.splitlines():
        if line.startswith("|"):
            name, *others = cells_of(line)
            rows[name] = others[:2]
    assert rows["Trainer"] == ["200", "1.50"]
    assert rows["this recipe"] == ["300", ""]
    assert rows["SFTTrainer"][0].startswith("void: held-out loss differs by 50.0%")


def test_without_measurements_there_are_no_figures():
    assert block(None) == "Not measured yet."


def test_the_file_of_results_has_a_line_per_run():
    cells = [cell_of(run_of("floor"), run_of("ours")), cell_of(run_of("floor"), name="another")]
    text = as_text(cells)
    assert json.loads(text) == {"cells": cells}
    assert len(text.splitlines()) == 2 + 2 + 3  # lines of the file, the cells and their runs


def test_a_run_that_has_just_ended_is_one_line():
    run = run_of("ours", load=[0.5, 1.2])
    assert line_of("a cell", run) == (
        "     0  a cell: ours: 1,000.0 ms per step, first after 9.0 s, load 0.50"
    )
    failed = {"contestant": "ours", "failed": "exit code 1: it broke"}
    assert line_of("a cell", failed) == "FAILED  a cell: ours: exit code 1: it broke"
