# SPDX-License-Identifier: Apache-2.0
"""What a cell of the GPU proof is, what it is given and what it returns.

A cell is one question to a GPU. It runs in its own process (evidence/gpu/runner.py), is given a
`Setup` and returns an `Outcome`. While it works it may save the rows that it has so far, which
survive if its time runs out.
"""

import importlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

LONGEST = 300  # seconds: the largest limit of a cell
RESERVE = 8  # seconds before its limit, in which a cell starts nothing more

# Verdicts. A cell without a bound only measures.
OK = "ok"
NOT_OK = "not ok"
MEASURED = "measured"
SKIPPED = "skipped"
FAILED = "failed"
TIMED_OUT = "timed out"

Row = dict[str, Any]  # one line of a table, all of plain numbers and text


class Skip(Exception):  # noqa: N818  no error: the cell does not apply
    """Raised by a cell that cannot run on this machine; the message is the reason."""


@dataclass
class Outcome:
    """What a cell found."""

    rows: list[Row] = field(default_factory=list)
    ok: bool | None = None  # whether the stated bound holds; None where the cell has no bound
    # Command lines that it ran, from the repository's root
    commands: list[str] = field(default_factory=list)

    def require(self, holds: bool) -> None:
        """Add a part of the bound, which holds if all of its parts do."""
        self.ok = self.ok and holds


@dataclass(frozen=True)
class Setup:
    """What a cell is given."""

    device: str  # "cuda" or "cpu"
    tiny: bool  # small shapes and few variants, for a machine without a GPU
    output: Path  # folder of all cells
    work: Path  # this cell's own folder
    deadline: float  # in the clock of time.monotonic
    shares_gpu: bool = False  # whether other programs use the GPU

    @property
    def models(self) -> Path:
        """Folder of the models that several cells use."""
        return self.output / "models"

    @property
    def on_gpu(self) -> bool:
        """Whether the cell runs on a GPU."""
        return self.device == "cuda"

    def seconds_left(self) -> float:
        """Return the seconds until this cell must end by itself to be in time."""
        return self.deadline - RESERVE - time.monotonic()

    def keep(self, outcome: Outcome) -> None:
        """Write the outcome so far, which is the result if the time runs out."""
        write_json(self.work / "outcome.json", asdict(outcome))


@dataclass(frozen=True)
class Cell:
    """One question to a GPU."""

    name: str  # topic and question, joined by a dot
    proves: str  # a sentence
    function: str  # "module.name" of this package: a function of a Setup
    bound: str = ""  # what must hold, "" if it only measures
    limit: int = 120  # seconds after which it is killed
    needs: tuple[str, ...] = ()  # packages without which it is skipped
    cuda_only: str = ""  # why it cannot run on a CPU, "" if it can

    def load(self) -> Callable[[Setup], Outcome]:
        """Return the cell's function. Its module is imported here, since it may load torch."""
        module, name = self.function.split(".")
        return getattr(importlib.import_module(f".{module}", __package__), name)

    def run(self, setup: Setup) -> Outcome:
        """Return what the cell finds. Raises Skip if it cannot run on this machine."""
        return self.load()(setup)


def write_json(path: Path, content: Any) -> None:
    """Write JSON atomically: the file is either the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def relative_error(value: float | None, reference: float | None) -> float:
    """Return |value / reference - 1|, or infinity if that is not defined.

    It is not if one of them is missing or NaN, or the reference is zero.
    """
    if value is None or not reference:
        return float("inf")
    error = abs(value / reference - 1)
    return float("inf") if math.isnan(error) else error
