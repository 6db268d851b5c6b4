# SPDX-License-Identifier: Apache-2.0
"""The files of the results, and the table: one row for each metric, one column for each model."""

import json
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from core import __version__
from evaluation.contestants import Contestant
from evaluation.figures import Figure
from exits import Exit, stop

RESULTS = "results.json"
TABLE = "results.md"
PLOT = "results.png"
SAMPLES = "samples"
PACKAGES = ("lm-eval", "transformers", "peft", "datasets", "torch")
DIRECTIONS = {True: "higher", False: "lower", None: ""}

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Measured:
    """A model with all of its figures.

    Attributes:
        facts: of each task: its version, and how it was asked.
    """

    contestant: Contestant
    figures: Sequence[Figure]
    facts: Mapping[str, Mapping[str, Any]]
    seconds: float

    def find(self, key: tuple[str, str]) -> Figure | None:
        """Return a figure by its task and metric, or None."""
        for figure in self.figures:
            if figure.key == key:
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
    """Return the table in Markdown."""
    header = ["task", "metric", "better", "rows"]
    for place, one in enumerate(measured):
        header.append(one.contestant.name)
        other = compared_with(measured, place)
        if other is not None:
            header.append(f"difference from {other.contestant.name}")
    lines = []
    for key in keys_of(measured):
        lines.append(line_of(key, measured))
    widths = [max(map(len, cells)) for cells in zip(header, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    padded = []
    for cells in (header, rule, *lines):
        inner = " | ".join(map(str.ljust, cells, widths))
        padded.append(f"| {inner} |")
    return "\n".join(padded)


def keys_of(measured: Sequence[Measured]) -> list[tuple[str, str]]:
    """Return the task and the metric of all figures, in the order in which lm-eval has them."""
    keys: dict[tuple[str, str], None] = {}
    for one in measured:
        keys |= dict.fromkeys(figure.key for figure in one.figures)
    return list(keys)


def line_of(key: tuple[str, str], measured: Sequence[Measured]) -> list[str]:
    """Return the cells of a metric."""
    figures = [one.find(key) for one in measured]
    known = next(figure for figure in figures if figure is not None)
    rows = "" if known.num_rows is None else str(known.num_rows)
    cells = [*key, DIRECTIONS[known.higher_is_better], rows]
    for place, figure in enumerate(figures):
        cells.append("" if figure is None else with_error(figure.value, figure.stderr))
        other = compared_with(measured, place)
        if other is not None:
            cells.append(difference_cell(figure, other.find(key)))
    return cells


def difference_cell(figure: Figure | None, before: Figure | None) -> str:
    """Return how much larger a value is than another one, with the error of that."""
    if figure is None or before is None:
        return ""
    gap, error = figure.difference_from(before)
    return with_error(gap, error, "+")


def with_error(value: float, error: float | None, sign: str = "") -> str:
    """Return a number with four digits after the point, and its standard error."""
    text = f"{value:{sign}.4f}"
    if error is None:
        return text
    return f"{text} ± {error:.4f}"


# ---- The files ----
def check_folder(folder: Path) -> None:
    """Exit with 73 if results cannot be written: now, and not after an hour of answers."""
    path = folder / RESULTS
    try:
        (folder / SAMPLES).mkdir(parents=True, exist_ok=True)
        for name in (RESULTS, TABLE, PLOT):
            path = folder / name
            path.open("a").close()
            if path.stat().st_size == 0:
                path.unlink()
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {error.strerror}")


def write(folder: Path, name: str, text: str) -> None:
    """Write a file of the results, or keep the one of an earlier evaluation as it was."""
    path = folder / name
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
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
    content = {
        "complete": len(measured) == number,
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
        "settings": dict(settings),
        "models": models,
    }
    write(folder, RESULTS, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of what an evaluation depends on."""
    found = {"accelerate-recipes": __version__, "python": platform.python_version()}
    return found | {name: version(name) for name in PACKAGES}


def model_to_json(one: Measured, other: Measured | None) -> dict[str, Any]:
    """Return what results.json has of a model, compared with another one if there is one."""
    tasks: dict[str, Any] = {}
    for figure in one.figures:
        facts = dict(one.facts.get(figure.task, {}))
        task = tasks.setdefault(figure.task, facts | {"rows": figure.num_rows, "metrics": {}})
        metric: dict[str, Any] = {
            "value": figure.value,
            "stderr": figure.stderr,
            "higher_is_better": figure.higher_is_better,
        }
        before = None if other is None else other.find(figure.key)
        if other is not None and before is not None:
            gap, error = figure.difference_from(before)
            difference = {"from": other.contestant.name, "value": gap, "stderr": error}
            metric["difference"] = difference
        task["metrics"][figure.metric] = metric
    return one.contestant.to_json() | {"seconds": one.seconds, "tasks": tasks}


def write_samples(folder: Path, name: str, samples: Mapping[str, Lines]) -> None:
    """Write what a model answered: one file for each task, one JSON object for each row.

    Args:
        name: of the model, as one of `distinct_names`.
    """
    for task, lines in samples.items():
        path = f"{SAMPLES}/{name}/{file_name(task)}.jsonl"
        rows = [json.dumps(line, ensure_ascii=False, default=str) for line in lines]
        write(folder, path, "\n".join(rows) + "\n")


def new_folder(parent: Path, model: str) -> Path:
    """Return a folder that is named after a model and has no results of an earlier evaluation."""
    name = file_name(model)
    folder = parent / name
    number = 1
    while (folder / RESULTS).exists():
        number += 1
        folder = parent / f"{name}-{number}"
    return folder


def distinct_names(names: Sequence[str]) -> list[str]:
    """Return names of models as those of files, with a number where two would be the same."""
    found: list[str] = []
    for name in names:
        own = file_name(name)
        distinct = own
        number = 1
        while distinct in found:
            number += 1
            distinct = f"{own}-{number}"
        found.append(distinct)
    return found


def file_name(name: str) -> str:
    """Return a name of a model or a task as one that any file system takes."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "-"
