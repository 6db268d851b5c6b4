# SPDX-License-Identifier: Apache-2.0
"""What a trial is: something that is done to a run, and the promise that the run must keep."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from proof import jobs
from proof.jobs import Run

if TYPE_CHECKING:
    from proof.trials.lab import Lab  # imports torch

# The job of proof.jobs has 20 steps over two epochs, with 12 rows per step.
STEPS = 20
EPOCH = 18  # steps of the first epoch
ROWS = 210
KILLS = 200  # at random moments, of runs that wait for their saves
# Units of figures
DIFFERENCES = "differences from an uninterrupted run"
LOSS = "largest relative difference in loss"
BROKEN = "broken promises"
CUT = jobs.CUT | {3: (2, 2)}
# A function that every rank calls in each step of every recipe, before the optimizer's step
IN_EACH_STEP = "skip_if_not_finite"


@dataclass(frozen=True)
class Result:
    """The result of a trial."""

    ok: bool
    figure: float = 0  # how far it is from the promise, in the unit of its group
    note: str = ""
    count: int = 1  # number of attempts


@dataclass(frozen=True)
class Trial:
    """One trial of a group."""

    what: str  # its row of the table
    detail: str
    attempt: Callable[["Lab", Path], Result]  # in a folder of its own
    count: int = 1  # number of attempts, as far as that is known before its result


def everywhere() -> bool:
    """Return that a group's trials are possible on this machine."""
    return True


@dataclass(frozen=True)
class Group:
    """Trials that measure one thing."""

    name: str
    unit: str  # the unit of a trial's figure
    trials: Callable[[], list[Trial]]  # the same on every machine
    is_possible: Callable[[], bool] = everywhere  # on this machine


def failed(note: str, figure: float = 0) -> Result:
    """Return the result of a trial that is not as promised."""
    return Result(False, figure, note)


def make_job(config: str = "single", ranks: int = 2, weights: str = "full") -> Run:
    """Return the job of evidence/parity.py under a YAML, with dropout where there are adapters."""
    ranks = jobs.ranks_of(config, ranks)
    batch, accumulation = CUT[ranks]
    flags = () if weights == "full" else ("--lora_dropout", "0.1")
    return Run("", config, ranks, batch, accumulation, weights, flags)


def jobs_on_meshes() -> list[Run]:
    """Return a job of evidence/parity.py for each YAML of a mesh, in the sizes that are its own."""
    chosen: dict[str, Run] = {}
    for run in jobs.runs_of_meshes():
        if run.config != "single" and run.weights == "full" and not run.sizes:
            chosen.setdefault(run.config, run)
    return list(chosen.values())
