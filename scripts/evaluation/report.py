# SPDX-License-Identifier: Apache-2.0
"""The table of figures, and the files of the results.

A model is an object of results.json: {"name", "before", "seconds", "tasks"}, where "before" is the
name of the model that it is compared with, if any, and tasks has {task: {"metrics": {metric:
{"value", "stderr", "higher_is_better", "difference"}}, how it was asked}}.
"""

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = "results.json"
TABLE = "results.md"
SAMPLES = "samples"
PACKAGES = ("transformers", "peft", "torch")
DIRECTIONS = {True: "higher", False: "lower", None: ""}

Model = dict[str, Any]


def add_differences(model: Model, others: Sequence[Model]) -> None:
    """Add to each value how much larger it is than that of the model which it is compared with."""
    for other in others:
        if other["name"] != model["before"]:
            continue
        for task, found in model["tasks"].items():
            for metric, figure in found["metrics"].items():
                before = other["tasks"][task]["metrics"][metric]
                figure["difference"] = figure["value"] - before["value"]


def make_table(models: Sequence[Model]) -> str:
    """Return the table in Markdown: one row for each metric, one column for each model."""
    header = ["task", "metric", "better", "rows"]
    for model in models:
        header.append(model["name"])
        if model["before"] is not None:
            header.append(f"difference from {model['before']}")
    lines = []
    for task, found in models[0]["tasks"].items():
        for metric, figure in found["metrics"].items():
            better = DIRECTIONS[figure["higher_is_better"]]
            cells = [task, metric, better, str(found["rows"] or "")]
            for model in models:
                cells += cells_of(model["tasks"][task]["metrics"][metric])
            lines.append(cells)
    widths = [max(map(len, cells)) for cells in zip(header, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    padded = [" | ".join(map(str.ljust, cells, widths)) for cells in (header, rule, *lines)]
    return "\n".join(f"| {inner} |" for inner in padded)


def cells_of(figure: Mapping[str, Any]) -> list[str]:
    """Return the value of a model, and its difference from another one if it is compared."""
    text = f"{figure['value']:.4f}"
    if figure["stderr"] is not None:
        text += f" ± {figure['stderr']:.4f}"
    if "difference" not in figure:
        return [text]
    return [text, f"{figure['difference']:+.4f}"]


# ---- The files ----
def write_results(folder: Path, models: Sequence[Model], settings: Any, number: int) -> None:
    """Write results.json with the models that were measured so far.

    Args:
        number: of all models. While some are missing, the file says that it is not complete.
    """
    command = shlex.join(["python", *sys.argv])
    content = {
        "complete": len(models) == number,
        "command": command,
        "settings": settings,
        "versions": {name: version(name) for name in PACKAGES},
        "models": models,
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
    (folder / RESULTS).write_text(text + "\n", encoding="utf-8")


def write_samples(folder: Path, name: str, task: str, lines: Sequence[Any]) -> None:
    """Write what a model answered to a task, one JSON object for each row."""
    path = folder / SAMPLES / file_name(name) / file_name(f"{task}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [json.dumps(line, ensure_ascii=False, default=str) for line in lines]
    path.write_text("\n".join([*rows, ""]), encoding="utf-8")


def file_name(name: str) -> str:
    """Return a name of a model or a task as one that any file system takes."""
    return re.sub(r"[^\w.-]+", "-", name).strip("-.") or "-"
