# SPDX-License-Identifier: Apache-2.0
"""Start one rank of a rehearsal: a program that `accelerate launch` starts instead of the recipe.

It is not meant to be called by hand. `scripts/rehearse.py` lets `accelerate launch` start this file
in every rank, followed by the recipe and its arguments. Accelerate is made to treat gloo CPU ranks
as it treats GPUs, and the rank is measured; then the recipe runs as `python RECIPE ...` would run
it, and the code with which it ends is recorded.
"""

import functools
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


def main() -> None:
    """Prepare the rank, and give the recipe the sys.argv and sys.path that python would give it.

    This project's scripts/ is on the path only until then, so that a copied recipe does not find
    modules there that it will not find in production.
    """
    recipe, *arguments = sys.argv[1:]
    # Its folder in place of this file's, and before recipes/, which this project's modules add
    sys.path[0] = os.path.dirname(os.path.abspath(recipe))
    import_path = list(sys.path)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    end = prepare()
    sys.argv = [recipe, *arguments]
    sys.path[:] = import_path
    code = 0
    try:
        runpy.run_path(recipe, run_name="__main__")
    except SystemExit as error:
        if isinstance(error.code, str):  # Python prints it
            raise
        code = error.code or 0
    sys.exit(end(code))


def prepare() -> Callable[[int], int]:
    """Patch the libraries for CPU ranks, install the measurements, and return how the rank ends.

    That is a function from the recipe's exit code to the launcher's. With REHEARSAL_DEVICE=cuda
    nothing is patched.
    """
    from rehearsal.ranks import record

    folder = Path(os.environ["REHEARSAL_FOLDER"])
    rank = int(os.environ.get("RANK", 0))
    (folder / f"pid.{rank}").write_text(str(os.getpid()))  # where rehearse.py sends signals
    # These imports take seconds, during which a signal must already find this process.
    from rehearsal import cpu_patches, live_tensors

    if os.environ["REHEARSAL_DEVICE"] == "cpu":
        cpu_patches.treat_cpu_as_gpu(int(os.environ["REHEARSAL_RANKS_PER_NODE"]))
    live_tensors.measure_first_step(folder / f"shards.{rank}")
    if "REHEARSAL_PROBE" in os.environ:
        # FILE:FOLDER, a program that measures in each rank and the folder of what it finds
        program, _, results = os.environ["REHEARSAL_PROBE"].rpartition(":")
        runpy.run_path(program)["track"](Path(results, str(rank)))
    end = functools.partial(record, path=folder / f"exit.{rank}")
    exit_hard = os._exit  # by which a thread may end its rank
    process = os.getpid()

    def record_and_exit(status: int) -> NoReturn:
        if os.getpid() == process:  # and no worker of a data loader, which is a fork
            status = end(status)
        exit_hard(status)

    os._exit = record_and_exit
    return end


if __name__ == "__main__":
    main()
