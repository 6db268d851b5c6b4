# SPDX-License-Identifier: Apache-2.0
"""What runs have written, metrics.jsonl and run.json in their folders, and the table of it."""

import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from common import Exit, stop

Line = dict[str, Any]  # one of metrics.jsonl: its step, and numbers or None by their names
Curve = tuple[list[float], list[float]]  # steps, and a value for each
LOSS = "loss"
SPEEDS = ("tokens_per_second", "images_per_second")
MEMORY = "peak_memory_gib"
SMALLER_IS_BETTER = ("loss", "perplexity", "mse")
PARTS = 20  # a smoothed value is a mean over one such part of a run
NOT_COMPARED = {"output_dir", "run_name"}


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells it.

    Attributes:
        folder: as the command line names it.
        lines: of metrics.jsonl; at least one has a loss.
        facts: the content of run.json; {} if there is none.
    """

    folder: str
    lines: list[Line]
    facts: dict[str, Any]

    def curve(self, name: str) -> Curve:
        """Return the values of a metric by step; empty where the run has not recorded it."""
        found = [line for line in self.lines if line.get(name) is not None]
        return [line["step"] for line in found], [line[name] for line in found]

    def eval_metrics(self) -> list[str]:
        """Return the names of the metrics of all evaluations, in the order of their lines."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.lines))
        return [name for name in names if name.startswith("eval_")]

    def settings(self) -> dict[str, Any]:
        """Return strategy, precision and arguments by their names, as run.json has them."""
        found = self.facts.get("summary", {}) | self.facts.get("arguments", {})
        compared = ["strategy", "precision", *self.facts.get("arguments", {})]
        return {name: found[name] for name in compared if name in found}


def read_run(folder: str) -> RecordedRun:
    """Return the run in a folder; exit with 65 if no line of its metrics has a loss."""
    path = Path(folder, "metrics.jsonl")
    record = Path(folder, "run.json")
    facts = {}
    try:
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        if record.is_file():
            facts = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"{path}: {error}; give the --output_dir of a run")
    run = RecordedRun(folder, lines, facts)
    if not run.curve(LOSS)[0]:
        stop(Exit.DATA, f"{path}: no line with a loss")
    return run


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags.

    At both ends only the inner half of the window exists.
    """
    half = len(values) // (2 * PARTS)
    averages = []
    for place in range(len(values)):
        first = max(0, place - half)
        averages.append(fmean(values[first : place + half + 1]))
    return averages


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return for each run what its folder's path has beyond the folder that all are in."""
    folders = [os.path.abspath(run.folder) for run in runs]
    common = os.path.commonpath(folders)
    return [os.path.relpath(folder, common) for folder in folders]


def differences(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return for each run the settings in which the runs with a run.json differ."""
    settings = [run.settings() for run in runs]
    known = [found for found in settings if found]
    differing = set()
    for name in set(itertools.chain.from_iterable(known)) - NOT_COMPARED:
        values = {json.dumps(found.get(name)) for found in known}
        if len(values) > 1:
            differing.add(name)
    return [{name: found[name] for name in found if name in differing} for found in settings]


# ---- The numbers ----
def rows_of(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the numbers of each run; None stands for what it has not recorded."""
    rows = []
    for run, differs in zip(runs, differences(runs), strict=True):
        steps, losses = run.curve(LOSS)
        row: dict[str, Any] = {"run": run.folder, "differs": differs, "steps": steps[-1]}
        part = max(1, len(losses) // PARTS)
        row["final_loss"] = fmean(losses[-part:])  # one step is a matter of luck
        row["best"] = {metric: best_of(run, metric) for metric in run.eval_metrics()}
        for name in SPEEDS:
            _, speeds = run.curve(name)
            row[name] = speeds[-1] if speeds else None
        row[MEMORY] = max(run.curve(MEMORY)[1], default=None)
        rows.append(row)
    return rows


def best_of(run: RecordedRun, metric: str) -> dict[str, float] | None:
    """Return the best value of a metric over all evaluations, and its step.

    Which of two is better follows from the metric's name, as with --load_best_model_at_end.
    """
    steps, values = run.curve(metric)
    if not values:
        return None
    best = max(values)
    if metric.endswith(SMALLER_IS_BETTER):
        best = min(values)
    return {"value": best, "step": steps[values.index(best)]}


def table(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table, and below it in what the runs differ."""
    columns = [["run", *names], ["steps", *(str(row["steps"]) for row in rows)]]
    for metric in dict.fromkeys(metric for row in rows for metric in row["best"]):
        cells = [f"best {metric}"]
        for row in rows:
            best = row["best"].get(metric)
            cells.append(f"{best['value']:.4g} at {best['step']}" if best else "-")
        columns.append(cells)
    for name in ("final_loss", *SPEEDS, MEMORY):
        cells = [row[name] for row in rows]
        if any(cell is not None for cell in cells):
            columns.append([name.replace("_", " "), *map(number_text, cells)])
    widths = [max(map(len, cells)) for cells in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        name, *numbers = cells
        padded = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    for name, row in zip(names, rows, strict=True):
        if row["differs"]:
            settings = [f"{key}={value}" for key, value in row["differs"].items()]
            lines.append(f"  {name}: {', '.join(settings)}")
    return lines


def number_text(value: float | None) -> str:
    """Return a number, or - where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
