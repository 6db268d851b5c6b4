# SPDX-License-Identifier: Apache-2.0
"""What runs have written, metrics.jsonl and run.json in their folders, and the table of it."""

import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Exit, stop

Line = dict[str, Any]  # one of metrics.jsonl: its step, and numbers or None by their names
Curve = tuple[list[float], list[float]]  # steps, and a value for each
LOSS = "loss"
SPEEDS = ("tokens_per_second", "images_per_second")
MEMORY = "peak_memory_gib"
SMALLER_IS_BETTER = ("loss", "perplexity", "mse")
PARTS = 20  # a smoothed value is a mean over one such part of a run
NOT_COMPARED = ("output_dir", "run_name")
LONGEST_VALUE = 32  # characters of a setting in a label


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
        summary = self.facts.get("summary", {})
        settings = {name: summary.get(name) for name in ("strategy", "precision")}
        settings |= self.facts.get("arguments", {})
        return {key: settings[key] for key in settings if key not in NOT_COMPARED}


def read_run(folder: str) -> RecordedRun:
    """Return the run in a folder; exit with 65 if no line of its metrics has a step and a loss."""
    path = Path(folder, "metrics.jsonl")
    record = Path(folder, "run.json")
    lines: list[Line] = []
    facts = {}
    place = str(path)
    try:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            place = f"{path}, line {number}"
            lines.append(json.loads(text))
        place = str(record)
        if record.is_file():
            facts = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"{place}: {error}; give the --output_dir of a run")
    if not any(line.get(LOSS) is not None for line in lines):
        stop(Exit.DATA, f"{path}: no line with a loss")
    return RecordedRun(folder, lines, facts)


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags.

    At both ends only the inner half of the window exists. It is not narrowed further, since the
    curve would then begin and end with the luck of a single step.
    """
    half = len(values) // (2 * PARTS)
    averages = []
    for place in range(len(values)):
        averages.append(mean(values[max(0, place - half) : place + half + 1]))
    return averages


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and the last twentieth: one step is a matter of luck."""
    part = max(1, len(values) // PARTS)
    return mean(values[:part]), mean(values[-part:])


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value; not finite if one of them is not."""
    return sum(values) / len(values)


# ---- Several runs ----
def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return for each run the part of its folder's path in which it differs from the others."""
    paths = [list(Path(run.folder).parts) for run in runs]
    for end in (0, -1):
        while all(len(parts) > 1 and parts[end] == paths[0][end] for parts in paths):
            for parts in paths:
                del parts[end]
    return ["/".join(parts) for parts in paths]


def differences(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return for each run the settings in which the runs with a run.json differ."""
    known = [run.settings() for run in runs if run.facts]
    differing = []
    for name in dict.fromkeys(itertools.chain.from_iterable(known)):
        values = {json.dumps(settings.get(name), sort_keys=True) for settings in known}
        if len(values) > 1:
            differing.append(name)
    found = []
    for run in runs:
        settings = run.settings()
        found.append({name: settings[name] for name in differing if name in settings})
    return found


def setting_text(name: str, value: Any) -> str:
    """Return a setting as a label has it, such as learning_rate=0.001."""
    text = str(value)
    if isinstance(value, float):
        text = f"{value:g}"
    if len(text) > LONGEST_VALUE:
        text = f"{text[: LONGEST_VALUE - 1]}…"
    return text if name == "strategy" else f"{name}={text}"


# ---- The numbers ----
def rows_of(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the numbers of each run; None stands for what it has not recorded, or no number."""
    rows = []
    for run, differs in zip(runs, differences(runs), strict=True):
        steps, losses = run.curve(LOSS)
        _, final_loss = first_and_last(losses)
        best = {metric: best_of(run, metric) for metric in run.eval_metrics()}
        row: dict[str, Any] = {"run": run.folder, "differs": differs}
        row["steps"] = steps[-1]
        row["final_loss"] = final_loss if math.isfinite(final_loss) else None
        row["best"] = {metric: found for metric, found in best.items() if found}
        for name in SPEEDS:
            _, speeds = run.curve(name)
            if speeds:
                row[name] = speeds[-1]
        row[MEMORY] = max(run.curve(MEMORY)[1], default=None)
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
    columns = [["run", *names], ["steps", *(str(row["steps"]) for row in rows)]]
    metrics = dict.fromkeys(metric for row in rows for metric in row["best"])
    for metric in metrics:
        cells = [f"best {metric}"]
        for row in rows:
            best = row["best"].get(metric)
            cells.append(f"{best['value']:.4g} at {best['step']}" if best else "-")
        columns.append(cells)
    for name in ("final_loss", *SPEEDS, MEMORY):
        cells = [row.get(name) for row in rows]
        if any(cell is not None for cell in cells):
            columns.append([name.replace("_", " "), *map(number_text, cells)])
    widths = [max(map(len, cells)) for cells in columns]
    lines = []
    for first, *others in zip(*columns, strict=True):
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    for name, row in zip(names, rows, strict=True):
        if row["differs"]:
            settings = [setting_text(*setting) for setting in row["differs"].items()]
            lines.append(f"  {name}: {', '.join(settings)}")
    return lines


def number_text(value: float | None) -> str:
    """Return a number, or - where there is none."""
    if value is None:
        return "-"
    if value < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}"
