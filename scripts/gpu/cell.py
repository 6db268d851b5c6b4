"""What a cell of the GPU proof is, what it is given and what it gives back.

A cell is one question to a GPU. It runs in a process of its own (scripts/gpu/runner.py), is given a
`Setup` and returns an `Outcome`; while it works it may hand over the rows it has so far, which
survive if its time runs out.
"""

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 300  # seconds that a cell may ask for
RESERVE = 8  # seconds before its limit at which a cell starts nothing more

# Verdicts. A cell without a bound only measures.
OK, NOT_OK, MEASURED = "ok", "not ok", "measured"
SKIPPED, FAILED, TIMED_OUT = "skipped", "failed", "timed out"


class Skip(Exception):
    """Raised by a cell that cannot run on this machine; the message is the reason."""


@dataclass
class Outcome:
    """What a cell found."""

    # One dictionary a line of the table, all of plain numbers and text
    rows: list = field(default_factory=list)
    ok: bool | None = None  # whether the stated bound holds; None where the cell has no bound
    # Command lines that it ran, from the repository's root
    commands: list = field(default_factory=list)


@dataclass(frozen=True)
class Setup:
    """What a cell is given."""

    device: str  # "cuda" or "cpu"
    tiny: bool  # small shapes and few variants, for a machine without a GPU
    output: Path  # folder of all cells
    work: Path  # this cell's own folder
    deadline: float  # in the clock of time.monotonic

    @property
    def models(self):
        """Folder of the models that several cells use."""
        return self.output / "models"

    def seconds_left(self):
        """Seconds until this cell has to end by itself, to be in time with its limit."""
        return self.deadline - RESERVE - time.monotonic()

    def keep(self, outcome):
        """Write what was found so far: it is all there is if the time runs out."""
        write_json(self.work / "outcome.json", asdict(outcome))


@dataclass(frozen=True)
class Cell:
    """One question."""

    name: str  # topic and question, joined by a dot
    proves: str  # a sentence
    run: Callable  # function of a Setup that returns an Outcome or raises Skip
    bound: str = ""  # what has to hold, "" if it only measures
    limit: int = 120  # seconds after which it is killed
    needs: tuple = ()  # packages without which it is skipped
    cuda_only: str = ""  # why it cannot run on a CPU, "" if it can


def write_json(path, content):
    """Write JSON so that the file is either the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    with open(part, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def relative_error(value, reference):
    """Return |value / reference - 1|, or infinity where that is no number.

    It is none where one of them is missing or not a number, or the reference is zero.
    """
    if value is None or not reference:
        return float("inf")
    error = abs(value / reference - 1)
    return float("inf") if math.isnan(error) else error
