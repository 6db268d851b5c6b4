# SPDX-License-Identifier: Apache-2.0
"""What plot_loss.py does with its command line: the picture, and the numbers as table and JSON."""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import Exit, stop
from plotting.picture import LOSS, MEMORY, MOST_RUNS, SPEED, curve_of, draw
from plotting.runs import (
    RecordedRun,
    differences,
    first_and_last,
    mean_speed,
    names_of,
    read_run,
    setting_text,
    speed_name,
    times_of,
)

RATE = "learning_rate"
EVALUATIONS = "eval"
OTHER_NAMES = {"memory": MEMORY, "images_per_second": SPEED}
# eval_loss is in the panel of the loss, of which the perplexity is another form
NOT_A_PANEL = ("eval_loss", "eval_perplexity")
SMALLER_IS_BETTER = ("loss", "perplexity", "mse")


def run(args: argparse.Namespace) -> None:
    """Draw the runs that the command line names, and print how several of them compare."""
    folders = {Path(folder).resolve() for folder in args.run_dirs}
    if len(folders) < len(args.run_dirs):
        stop(Exit.USAGE, "a folder is given twice: name each run once")
    if len(folders) > MOST_RUNS:
        stop(Exit.USAGE, f"{len(folders)} runs: no reader can tell more than {MOST_RUNS} apart")
    runs = [read_run(folder) for folder in args.run_dirs]
    if args.x != "step" and None in map(speed_name, runs):
        stop(Exit.DATA, f"--x {args.x}: a run has not recorded what it saw and when; use --x step")
    panels = []
    for panel in wanted_panels(args.panels, runs):
        if any(curve_of(one, panel)[0] for one in runs):
            panels.append(panel)
    if not panels:
        stop(Exit.DATA, f"no panel {' '.join(args.panels)}: no run has it in its metrics.jsonl")
    output = args.output or default_output(runs)
    rows = rows_of(runs)
    try:
        draw(runs, panels, args.x).savefig(output, dpi=150)
        if args.json is not None:
            content = {"runs": rows}
            args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:  # An unknown ending is a ValueError
        stop(Exit.CANNOT_WRITE, f"cannot write {output}: {error}")
    if len(runs) > 1:
        print("\n".join(table(names_of(runs), rows)))
        print()
    print(output)


def default_output(runs: Sequence[RecordedRun]) -> Path:
    """Return the picture in the folder of the first run."""
    name = "loss.png" if len(runs) == 1 else "comparison.png"
    return Path(runs[0].folder, name)


def wanted_panels(names: Sequence[str] | None, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics that are drawn; `eval` stands for those of the evaluations."""
    if names is None:
        names = [LOSS, EVALUATIONS, SPEED, MEMORY, RATE]
        if len(runs) == 1:
            names = [LOSS, RATE]
    panels: dict[str, None] = {}
    for name in names:
        found = [OTHER_NAMES.get(name, name)]
        if name == EVALUATIONS:
            found = []
            for one in runs:
                found += [metric for metric in one.eval_metrics() if metric not in NOT_A_PANEL]
        panels |= dict.fromkeys(found)
    return list(panels)


# ---- The numbers ----
def rows_of(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the numbers of each run; None stands for what it has not recorded, or no number."""
    rows = []
    for one, differs in zip(runs, differences(runs), strict=True):
        _, final_loss = first_and_last(one.curve(LOSS)[1])
        best = {metric: best_of(one, metric) for metric in one.eval_metrics()}
        row: dict[str, Any] = {"run": one.folder, "differs": differs}
        row["steps"] = one.steps[-1]["step"]
        row["final_loss"] = final_loss if math.isfinite(final_loss) else None
        row["best"] = {metric: found for metric, found in best.items() if found}
        row["speed"] = speed_name(one)
        row["mean_speed"] = mean_speed(one)
        row["peak_memory_gib"] = max(one.curve(MEMORY)[1], default=None)
        row["seconds"] = max(times_of(one), default=None)
        rows.append(row)
    return rows


def best_of(run: RecordedRun, metric: str) -> dict[str, float] | None:
    """Return the best finite value of a metric over all evaluations, and its step.

    Which of two is better follows from the metric's name, as with --load_best_model_at_end.
    """
    found = []
    for step, value in zip(*run.curve(metric), strict=True):
        if math.isfinite(value):
            found.append({"value": value, "step": step})
    is_larger_better = not metric.endswith(SMALLER_IS_BETTER)
    found.sort(key=lambda best: best["value"], reverse=is_larger_better)
    return next(iter(found), None)


def table(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table, and below it in what the runs differ."""
    metrics = dict.fromkeys(metric for row in rows for metric in row["best"])
    metrics.pop("eval_perplexity", None)  # eval_loss says the same
    columns = [["run", *names]]
    for head, key, form in (("steps", "steps", "d"), ("final loss", "final_loss", ".4g")):
        columns.append([head, *(number_text(row[key], form) for row in rows)])
    for metric in metrics:
        cells = [f"best {metric}"]
        for row in rows:
            best = row["best"].get(metric)
            text = "-"
            if best is not None:
                text = f"{best['value']:.4g} at {best['step']}"
            cells.append(text)
        columns.append(cells)
    speed = (rows[0]["speed"] or SPEED).replace("_per_second", "/s")
    for head, key, form in (
        (speed, "mean_speed", ",.0f"),
        ("peak GiB", "peak_memory_gib", ".2f"),
        ("seconds", "seconds", ",.1f"),
    ):
        columns.append([head, *(number_text(row[key], form) for row in rows)])
    lines = aligned(columns)
    for name, row in zip(names, rows, strict=True):
        if row["differs"]:
            settings = [setting_text(*setting) for setting in row["differs"].items()]
            lines.append(f"  {name}: {', '.join(settings)}")
    return lines


def number_text(value: float | None, form: str) -> str:
    """Return a number, or - where there is none."""
    return "-" if value is None else format(value, form)


def aligned(columns: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, numbers to the right."""
    padded = []
    for number, cells in enumerate(columns):
        width = max(map(len, cells))
        if number == 0:
            padded.append([cell.ljust(width) for cell in cells])
        else:
            padded.append([cell.rjust(width) for cell in cells])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]
