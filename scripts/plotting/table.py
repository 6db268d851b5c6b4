# SPDX-License-Identifier: Apache-2.0
"""The numbers of each run: a table for the terminal, and the same as JSON."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from plotting.calls import duration, mean_speed, speed_name
from plotting.curves import curve_of
from plotting.labels import differences, names_of, setting_text, shortened
from plotting.panels import evaluation_metrics
from plotting.runs import RecordedRun

SMALLER_IS_BETTER = ("loss", "perplexity", "mse")
LONGEST_NAME = 32  # characters


@dataclass(frozen=True)
class Best:
    """The best value of a metric over all evaluations, and the step after which it was."""

    value: float
    step: int


@dataclass(frozen=True)
class Row:
    """The numbers of a run; None stands for what it has not recorded.

    Attributes:
        run: its folder.
        differs: the settings in which it differs from the other runs.
        final_loss: the mean training loss over the last twentieth of the steps.
        best: by the names of the metrics.
        speed: the metric that `mean_speed` is of, tokens_per_second or images_per_second.
        mean_speed: without evaluations and the first steps of each call.
        peak_memory_gib: of rank 0: of its GPU, or else of the process.
        seconds: of training, evaluations and checkpoints included.
    """

    run: str
    differs: dict[str, Any]
    steps: int
    final_loss: float
    best: dict[str, Best]
    speed: str | None
    mean_speed: float | None
    peak_memory_gib: float | None
    seconds: float | None


def rows_of(runs: Sequence[RecordedRun]) -> list[Row]:
    """Return the numbers of all runs."""
    return [row_of(run, differs) for run, differs in zip(runs, differences(runs), strict=True)]


def row_of(run: RecordedRun, differs: dict[str, Any]) -> Row:
    """Return the numbers of a run."""
    losses = curve_of(run.steps, "loss")
    best = {}
    for metric in evaluation_metrics([run]):
        found = best_of(run, metric)
        if found is not None:
            best[metric] = found
    return Row(
        run=run.folder,
        differs=differs,
        steps=run.steps[-1]["step"],
        final_loss=losses.last(),
        best=best,
        speed=speed_name(run),
        mean_speed=mean_speed(run),
        peak_memory_gib=max(curve_of(run.steps, "peak_memory_gib").values, default=None),
        seconds=duration(run),
    )


def best_of(run: RecordedRun, metric: str) -> Best | None:
    """Return the best value of a metric, or None if none is finite.

    Which of two is better follows from the metric's name, as with --load_best_model_at_end.
    """
    curve = curve_of(run.evaluations, metric)
    found = []
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(value):
            found.append(Best(value, int(step)))
    if metric.endswith(SMALLER_IS_BETTER):
        return min(found, key=lambda best: best.value, default=None)
    return max(found, key=lambda best: best.value, default=None)


# ---- As text ----


def table(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the lines of the table, and below it in what the runs differ."""
    names = [shortened(name, LONGEST_NAME) for name in names_of(runs)]
    rows = rows_of(runs)
    columns = columns_of(names, rows)
    lines = aligned(columns)
    if any(row.differs for row in rows):
        lines += ["", "In what they differ:"]
    for name, row in zip(names, rows, strict=True):
        if row.differs:
            settings = [setting_text(*setting) for setting in row.differs.items()]
            lines.append(f"  {name}: {', '.join(settings)}")
    return lines


def columns_of(names: Sequence[str], rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return the cells of each column by its head; a column that would be empty is left out."""
    columns = {
        "run": list(names),
        "steps": [f"{row.steps}" for row in rows],
        "final loss": [f"{row.final_loss:.4g}" for row in rows],
    }
    metrics = dict.fromkeys(metric for row in rows for metric in row.best)
    metrics.pop("eval_perplexity", None)  # eval_loss says the same
    for metric in metrics:
        columns[f"best {metric}"] = [best_text(row.best.get(metric)) for row in rows]
    for speed in dict.fromkeys(row.speed for row in rows if row.speed):
        cells = []
        for row in rows:
            cells.append(number_text(row.mean_speed if row.speed == speed else None, ",.0f"))
        columns[speed.replace("_per_second", "/s")] = cells
    columns["peak GiB"] = [number_text(row.peak_memory_gib, ".2f") for row in rows]
    columns["time"] = [time_text(row.seconds) for row in rows]
    return {head: cells for head, cells in columns.items() if set(cells) != {"-"}}


def aligned(columns: dict[str, list[str]]) -> list[str]:
    """Return the lines of a table: the first column to the left, numbers to the right."""
    padded = []
    for number, (head, cells) in enumerate(columns.items()):
        width = max(len(cell) for cell in [head, *cells])
        align = str.ljust if number == 0 else str.rjust
        padded.append([align(cell, width) for cell in [head, *cells]])
    return ["  ".join(cells).rstrip() for cells in zip(*padded, strict=True)]


def number_text(value: float | None, form: str) -> str:
    """Return a number, or - where there is none."""
    return "-" if value is None else format(value, form)


def best_text(best: Best | None) -> str:
    """Return the best value of a metric and its step."""
    if best is None:
        return "-"
    return f"{best.value:.4g} at {best.step}"


def time_text(seconds: float | None) -> str:
    """Return a duration in the unit that fits it."""
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.1f} min"
    return f"{seconds / 3600:.1f} h"


# ---- As JSON ----


def as_json(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the numbers of all runs as JSON has them: None in place of what is not finite."""
    rows: list[dict[str, Any]] = [asdict(row) for row in rows_of(runs)]
    for row in rows:
        if not math.isfinite(row["final_loss"]):
            row["final_loss"] = None
    return {"runs": rows}
