# SPDX-License-Identifier: Apache-2.0
"""Run and time the quickstarts, and read what each model learned from held-out rows."""

import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paths import ROOT

# The number that each recipe's quickstart reports, from scripts/generate.py or from metrics.jsonl
SHOWN = {
    "llama": "exact_match",
    "llama_dpo": "exact_match",
    "mistral_pretrain": "eval_perplexity",
    "mixtral": "exact_match",
    "t5": "eval_bleu",
    "bert": "eval_accuracy",
    "bert_ner": "eval_f1",
    "vit": "eval_accuracy",
}
RECIPES = tuple(SHOWN)
LIBRARIES = ("torch", "transformers", "accelerate")

Row = dict[str, Any]  # a row of results/quickstarts.json


class ExampleError(Exception):
    """A quickstart failed; the message has its exit code and the end of its output."""


@dataclass(frozen=True)
class Taught:
    """One number on held-out rows, before and after training."""

    before: float
    after: float


def read_taught(recipe: str, folder: Path) -> Taught:
    """Return the number of SHOWN before and after training, from the files of a quickstart.

    It is the score of scripts/generate.py, or the first and the last evaluation.
    """
    name = SHOWN[recipe]
    if (folder / "before.json").exists():
        before = json.loads((folder / "before.json").read_text())
        after = json.loads((folder / "after.json").read_text())
        return Taught(before[name], after[name])
    metrics = (folder / "run" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in metrics.splitlines()]
    values = [line[name] for line in lines if name in line]
    return Taught(values[0], values[-1])


def run_example(recipe: str, folder: Path) -> Row:
    """Run one quickstart in a folder and return its row. Raises ExampleError if it fails."""
    venv = Path(sys.prefix)
    (venv / ".installed").touch()  # This environment has what the quickstart would install.
    begun = time.monotonic()
    command = ["make", "-C", str(ROOT), "quickstart", f"RECIPE={recipe}"]
    command += [f"VENV={venv}", f"OUT={folder}"]
    done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise ExampleError(f"the quickstart ended with {done.returncode}: {done.stdout[-2000:]}")
    taught = read_taught(recipe, folder)
    shown = SHOWN[recipe].removeprefix("eval_").replace("_", " ")
    row = {"recipe": recipe, "shown": shown, "before": taught.before, "after": taught.after}
    row["seconds"] = round(time.monotonic() - begun, 1)
    return row


def line_of(row: Row) -> str:
    """Return one line about a quickstart that has just ended."""
    taught = f"{row['before']:.3g} before, {row['after']:.3g} after"
    return f"{row['recipe']}: {row['shown']} {taught}, {row['seconds']:.0f} s"


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file of results, [] if it does not exist."""
    if not path.is_file():
        return []
    return json.loads(path.read_text())["rows"]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a file of results, which keeps the rows of other recipes."""
    by_recipe = {row["recipe"]: row for row in read_rows(path)}
    by_recipe |= {row["recipe"]: row for row in rows}
    ordered = [by_recipe[recipe] for recipe in RECIPES if recipe in by_recipe]
    versions = {name: importlib.metadata.version(name) for name in LIBRARIES}
    lines = ",\n".join(json.dumps(row) for row in ordered)
    machine = f'"cores": {os.cpu_count()}, "versions": {json.dumps(versions)}'
    path.write_text(f'{{{machine}, "rows": [\n{lines}\n]}}\n')
