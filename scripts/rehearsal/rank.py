# SPDX-License-Identifier: Apache-2.0
"""One rank of a rehearsal: what happens in it before and after the recipe."""

import os
import runpy
import sys
from pathlib import Path
from typing import NoReturn

from rehearsal.exit_codes import Rank, exit_code_of


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
    if "REHEARSAL_PROBE" in os.environ:
        # FILE:FOLDER, a program that measures in each rank and the folder of what it finds
        program, _, folder = os.environ["REHEARSAL_PROBE"].rpartition(":")
        runpy.run_path(program)["track"](Path(folder, str(rank.number)))
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
