# SPDX-License-Identifier: Apache-2.0
"""The table of figures, and the files of the results.

A model is an object of results.json: {"name", "before", "adapters_on", "seconds", "tasks"}, where
tasks has {task: {"metrics": {metric: {"value", "stderr", "higher_is_better"}}, how it was asked}}.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from common import Exit, stop
from core import __version__

RESULTS = "results.json"
TABLE = "results.md"
SAMPLES = "samples"
PACKAGES = ("lm_eval", "transformers", "peft", "datasets", "torch")
DIRECTIONS = {True: "higher", False: "lower", None: ""}

Model = dict[str, Any]


def compared_with(models: Sequence[Model], place: int) -> Model | None:
    """Return the model that one is compared with: its base, or else the first of them all."""
    for other in models:
        if other["name"] == models[place]["before"]:
            return other
    has_base = any(other["before"] is not None for other in models)
    return None if has_base or place == 0 else models[0]


def add_differences(models: Sequence[Model]) -> None:
    """Add to each value how much larger it is than that of the model which it is compared with."""
    for place, one in enumerate(models):
        other = compared_with(models, place)
        for task, found in one["tasks"].items():
            for metric, figure in found["metrics"].items():
                before = other and other["tasks"].get(task, {}).get("metrics", {}).get(metric)
                if other and before:
                    gap = figure["value"] - before["value"]
                    figure["difference"] = {"from": other["name"], "value": gap}


# ---- The table ----
def make_table(models: Sequence[Model]) -> str:
    """Return the table in Markdown: one row for each metric, one column for each model."""
    header = ["task", "metric", "better", "rows"]
    for place, one in enumerate(models):
        header.append(one["name"])
        other = compared_with(models, place)
        if other is not None:
            header.append(f"difference from {other['name']}")
    lines = []
    for task, found in models[0]["tasks"].items():
        for metric, figure in found["metrics"].items():
            better = DIRECTIONS[figure["higher_is_better"]]
            cells = [task, metric, better, str(found["rows"] or "")]
            lines.append(cells + cells_of(task, metric, models))
    widths = [max(map(len, cells)) for cells in zip(header, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    padded = []
    for cells in (header, rule, *lines):
        inner = " | ".join(map(str.ljust, cells, widths))
        padded.append(f"| {inner} |")
    return "\n".join(padded)


def cells_of(task: str, metric: str, models: Sequence[Model]) -> list[str]:
    """Return the values of all models, each with its difference from another one."""
    cells = []
    for place, one in enumerate(models):
        figure = one["tasks"].get(task, {}).get("metrics", {}).get(metric, {})
        text = f"{figure['value']:.4f}" if figure else ""
        if figure.get("stderr") is not None:
            text += f" ± {figure['stderr']:.4f}"
        cells.append(text)
        if compared_with(models, place) is not None:
            gap = figure.get("difference")
            cells.append(f"{gap['value']:+.4f}" if gap else "")
    return cells


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
    folder: Path, models: Sequence[Model], settings: Mapping[str, Any], number: int
) -> None:
    """Write results.json with the models that were measured so far.

    Args:
        number: of all models. While some are missing, the file says that it is not complete.
    """
    add_differences(models)
    content = {
        "complete": len(models) == number,
        "command": shlex.join(["python", *sys.argv]),
        "versions": versions(),
        "settings": dict(settings),
        "models": models,
    }
    write(folder, RESULTS, json.dumps(content, indent=2, ensure_ascii=False, default=str) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of what measures."""
    found = {"accelerate-recipes": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
