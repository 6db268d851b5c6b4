# SPDX-License-Identifier: Apache-2.0
"""One rank of a rehearsal: what happens in it before and after the recipe."""

import importlib
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rehearsal.exit_codes import Rank, exit_code_of


@dataclass(frozen=True)
class Probe:
    """A measurement in each rank, by a call of module.track(path) before the recipe starts."""

    variable: str  # environment variable that names the folder of the ranks' measurements
    module: str
    file: str  # the name of a rank's file there, without its number


PEAKS = Probe("REHEARSAL_PEAKS", "measured.peak_probe", "peak")
HOST_MEMORY = Probe("REHEARSAL_HOST_MEMORY", "measured.host_probe", "host")
SAVE_MEMORY = Probe("REHEARSAL_SAVE_MEMORY", "measured.save_probe", "save")
ACTIVATIONS = Probe("REHEARSAL_ACTIVATIONS", "measured.activation_probe", "activations")
PROBES = (PEAKS, HOST_MEMORY, SAVE_MEMORY, ACTIVATIONS)


def prepare() -> Rank:
    """Patch the libraries for CPU ranks, install the measurements, and return the rank.

    With REHEARSAL_DEVICE=cuda nothing is changed.
    """
    rank = Rank(
        folder=Path(os.environ["REHEARSAL_FOLDER"]),
        number=int(os.environ.get("RANK", 0)),
        ranks_here=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
    )
    rank.record_process(os.getpid())
    # These imports take seconds, during which a signal must already find this process.
    from rehearsal import cpu_patches, live_tensors

    if os.environ["REHEARSAL_DEVICE"] == "cpu":
        cpu_patches.treat_cpu_as_gpu(int(os.environ["REHEARSAL_RANKS_PER_NODE"]))
    live_tensors.measure_first_step(rank.folder / f"shards.{rank.number}")
    for probe in PROBES:
        if probe.variable in os.environ:
            folder = Path(os.environ[probe.variable])
            importlib.import_module(probe.module).track(folder / f"{probe.file}.{rank.number}")
    record_hard_exits(rank)
    return rank


def record_hard_exits(rank: Rank) -> None:
    """Also record the code of `os._exit`, by which a thread may end its rank.

    The codes of data loader workers, which are forks of the rank, are not recorded.
    """
    original = os._exit
    process = os.getpid()

    def record_and_exit(status: int) -> NoReturn:
        if os.getpid() == process:
            status = rank.agree(status)
        original(status)

    os._exit = record_and_exit


def run(recipe: str, rank: Rank) -> NoReturn:
    """Run the recipe, and exit with the code on which the ranks agree."""
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as error:
        sys.exit(rank.agree(exit_code_of(error)))
    sys.exit(rank.agree(0))
