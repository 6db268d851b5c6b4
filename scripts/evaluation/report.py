# SPDX-License-Identifier: Apache-2.0
"""Figures with their errors, the table of them, and the files of the results.

Two models are asked the same rows. So the error of their difference is that of the differences of
the rows, which is smaller than the errors of both suggest: rows that are hard for one are hard for
the other.
"""

import importlib.util
import json
import math
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import Exit, stop
from core import __version__
from evaluation.contestants import Contestant

RESULTS = "results.json"
TABLE = "results.md"
SAMPLES = "samples"
PACKAGES = ("lm_eval", "transformers", "peft", "datasets", "torch")
DIRECTIONS = {True: "higher", False: "lower", None: ""}


# ---- Figures ----
@dataclass(frozen=True)
class Figure:
    """A metric of a task for one model.

    Attributes:
        metric: with the name of the filter of the answers, if there is one.
        stderr: None where there is none.
        higher_is_better: None if unknown.
        residuals: of each row, by how much it moves the value from what it is for the other rows,
            times the number of rows; None for values that are no means.
    """

    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool | None
    residuals: Sequence[float] | None = None

    def difference_from(self, before: "Figure") -> tuple[float, float | None]:
        """Return how much larger the value is than that of another model, and the error of that."""
        gap = self.value - before.value
        ours = self.residuals
        theirs = before.residuals
        if ours is None or theirs is None or len(ours) != len(theirs):
            return gap, None
        return gap, error_of([a - b for a, b in zip(ours, theirs, strict=True)])


def mean_figure(metric: str, values: Sequence[float]) -> Figure:
    """Return the mean of rows as a figure of which more is better."""
    mean = sum(values) / len(values)
    residuals = [value - mean for value in values]
    return Figure(metric, mean, error_of(residuals), True, residuals)


def weighted_figure(metric: str, sums: Sequence[tuple[float, int]]) -> Figure:
    """Return the mean over all tokens, of which less is better.

    Args:
        sums: of each row, over its tokens, and their number.
    """
    number = sum(count for _, count in sums)
    mean = math.fsum(total for total, _ in sums) / number
    scale = len(sums) / number
    residuals = [scale * (total - mean * count) for total, count in sums]
    return Figure(metric, mean, error_of(residuals), False, residuals)


def error_of(residuals: Sequence[float]) -> float | None:
    """Return the standard error of a mean by its residuals; None for fewer than two rows."""
    number = len(residuals)
    if number < 2:
        return None
    mean = math.fsum(residuals) / number
    squares = math.fsum((residual - mean) ** 2 for residual in residuals)
    return math.sqrt(squares / (number - 1) / number)


@dataclass
class Measured:
    """A model with all of its figures.

    Attributes:
        figures: {task: its figures}.
        facts: {task: how it was asked}.
    """

    contestant: Contestant
    figures: dict[str, list[Figure]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    seconds: float = 0.0

    def find(self, task: str, metric: str) -> Figure | None:
        """Return a figure, or None."""
        for figure in self.figures.get(task, []):
            if figure.metric == metric:
                return figure
        return None


def compared_with(measured: Sequence[Measured], place: int) -> Measured | None:
    """Return the model that one is compared with: its base, or else the first of them all."""
    one = measured[place]
    for other in measured:
        if other.contestant.name == one.contestant.before:
            return other
    has_base = any(other.contestant.before is not None for other in measured)
    if has_base or place == 0:
        return None
    return measured[0]


# ---- The table ----
def make_table(measured: Sequence[Measured]) -> str:
    """Return the table in Markdown: one row for each metric, one column for each model."""
    header = ["task", "metric", "better", "rows"]
    for place, one in enumerate(measured):
        header.append(one.contestant.name)
        other = compared_with(measured, place)
        if other is not None:
            header.append(f"difference from {other.contestant.name}")
    lines = []
    for task, figures in measured[0].figures.items():
        for figure in figures:
            rows = measured[0].facts[task]["rows"]
            cells = [task, figure.metric, DIRECTIONS[figure.higher_is_better], str(rows or "")]
            lines.append(cells + cells_of(task, figure.metric, measured))
    widths = [max(map(len, cells)) for cells in zip(header, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    padded = []
    for cells in (header, rule, *lines):
        inner = " | ".join(map(str.ljust, cells, widths))
        padded.append(f"| {inner} |")
    return "\n".join(padded)


def cells_of(task: str, metric: str, measured: Sequence[Measured]) -> list[str]:
    """Return the values of all models, each with its difference from another one."""
    cells = []
    for place, one in enumerate(measured):
        figure = one.find(task, metric)
        cells.append("" if figure is None else with_error(figure.value, figure.stderr))
        other = compared_with(measured, place)
        if other is None:
            continue
        before = other.find(task, metric)
        if figure is None or before is None:
            cells.append("")
        else:
            cells.append(with_error(*figure.difference_from(before), sign="+"))
    return cells


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """Return a number with four digits after the point, and its standard error."""
    text = f"{value:{sign}.4f}"
    if error is None:
        return text
    return f"{text} ± {error:.4f}"


# ---- The files ----
def write(folder: Path, name: str, text: str) -> None:
    """Write a file of the results; exit with 73 if it cannot be written."""
    path = folder / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {error.strerror}")


def write_results(
    folder: Path, measured: Sequence[Measured], settings: Mapping[str, Any], number: int
) -> None:
    """Write results.json with the models that were measured so far.

    Args:
        number: of all models. While some are missing, the file says that it is not complete.
    """
    models = []
    for place, one in enumerate(measured):
        models.append(model_to_json(one, compared_with(measured, place)))
    found = {"accelerate-recipes": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        if importlib.util.find_spec(name):
            found[name] = version(name)
    content = {
        "complete": len(measured) == number,
        "command": shlex.join(["python", *sys.argv]),
        "versions": found,
        "settings": dict(settings),
        "models": models,
    }
    write(folder, RESULTS, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def model_to_json(one: Measured, other: Measured | None) -> dict[str, Any]:
    """Return what results.json has of a model, compared with another one if there is one."""
    tasks: dict[str, Any] = {}
    for task, figures in one.figures.items():
        metrics: dict[str, Any] = {}
        for figure in figures:
            metric: dict[str, Any] = {"value": figure.value, "stderr": figure.stderr}
            metric["higher_is_better"] = figure.higher_is_better
            before = None if other is None else other.find(task, figure.metric)
            if other is not None and before is not None:
                gap, error = figure.difference_from(before)
                difference = {"from": other.contestant.name, "value": gap, "stderr": error}
                metric["difference"] = difference
            metrics[figure.metric] = metric
        tasks[task] = {**one.facts[task], "metrics": metrics}
    contestant = one.contestant
    found: dict[str, Any] = {"name": contestant.name, "before": contestant.before}
    return found | {"adapters_on": contestant.source.base, "seconds": one.seconds, "tasks": tasks}


def write_samples(folder: Path, name: str, task: str, lines: Sequence[Any]) -> None:
    """Write what a model answered to a task, one JSON object for each row."""
    rows = [json.dumps(line, ensure_ascii=False, default=str) for line in lines]
    path = f"{SAMPLES}/{file_name(name)}/{file_name(task)}.jsonl"
    write(folder, path, "\n".join(rows) + "\n")


def new_folder(parent: Path, model: str) -> Path:
    """Return a folder that is named after a model and has no results of an earlier evaluation."""
    folder = parent / file_name(model)
    number = 1
    while (folder / RESULTS).exists():
        number += 1
        folder = parent / f"{file_name(model)}-{number}"
    return folder


def file_name(name: str) -> str:
    """Return a name of a model or a task as one that any file system takes."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "-"
