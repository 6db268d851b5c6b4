# SPDX-License-Identifier: Apache-2.0
"""Arrays that one rank of each host computes, and that its other ranks map into their memory."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from components.ending import end_all_ranks
from components.exits import Exit


def compute_once_a_host(
    accelerator: Accelerator, compute: Callable[[], Sequence[np.ndarray]]
) -> Sequence[np.ndarray]:
    """Return what `compute` returns on one rank of each host. Every rank takes part.

    The arrays go through files in the folder of temporary files (TMPDIR), which are removed once
    all ranks have mapped them: a mapped file stays until the last process ends. All ranks end with
    73 if they cannot be written.
    """
    if accelerator.num_processes == 1:
        return compute()
    with tempfile.TemporaryDirectory(prefix="recipes_") as name:
        written = (0, "")
        if accelerator.is_local_main_process:
            written = write(Path(name), compute())
        found = gather_object([(name, *written)])
        problems = [problem for _, _, problem in found if problem]
        if problems:
            end_all_ranks(accelerator, Exit.CANNOT_WRITE, problems[0])
        # The ranks of a host have consecutive numbers
        name, number, _ = found[accelerator.process_index - accelerator.local_process_index]
        arrays = [np.load(path_of(Path(name), place), mmap_mode="r") for place in range(number)]
        accelerator.wait_for_everyone()  # before the files are removed
    return arrays


def write(folder: Path, arrays: Sequence[np.ndarray]) -> tuple[int, str]:
    """Write arrays into a folder; return their number, and why they cannot be written or ""."""
    try:
        for place, array in enumerate(arrays):
            np.save(path_of(folder, place), array)
    except OSError as error:
        size = sum(array.nbytes for array in arrays)
        return 0, f"{folder}: {error}: {size:,} bytes are needed there; TMPDIR names another folder"
    return len(arrays), ""


def path_of(folder: Path, place: int) -> Path:
    """Return the path of an array in the folder of temporary files."""
    return folder / f"{place}.npy"
