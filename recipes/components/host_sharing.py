# SPDX-License-Identifier: Apache-2.0
"""Arrays that one rank of each host computes, and that its other ranks map into their memory."""

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from accelerate.utils import gather_object

from components.ending import end_all_ranks
from components.exits import Exit

NewArray = Callable[[int, Any], np.ndarray]  # makes an array of a length and a type, as numpy.empty


def compute_once_a_host(
    accelerator: Accelerator, compute: Callable[[NewArray], Sequence[np.ndarray]]
) -> Sequence[np.ndarray]:
    """Return what `compute` returns on one rank of each host. Every rank takes part.

    The arrays are in files in the folder of temporary files (TMPDIR), which are removed once all
    ranks have mapped them: a mapped file stays until the last process ends. All ranks end with 73
    if there is no room for them.

    Args:
        compute: a function of one that makes arrays. A large array that it makes so is in its file
            from the beginning, and is never in memory twice.
    """
    if accelerator.num_processes == 1:
        return compute(np.empty)
    with tempfile.TemporaryDirectory(prefix="recipes_") as folder:
        files: list[tuple[str, str]] = []
        problem = ""
        if accelerator.is_local_main_process:
            try:
                files = SharedFiles(Path(folder)).write(compute)
            except OSError as error:
                problem = f"{folder}: {error}: TMPDIR names another folder for temporary files"
        found = gather_object([(files, problem)])
        problems = [problem for _, problem in found if problem]
        if problems:
            end_all_ranks(accelerator, Exit.CANNOT_WRITE, problems[0])
        # The ranks of a host have consecutive numbers
        files, _ = found[accelerator.process_index - accelerator.local_process_index]
        arrays = [np.memmap(path, dtype, "r") for path, dtype in files]
        accelerator.wait_for_everyone()  # before the files are removed
    return arrays


class SharedFiles:
    """Files of arrays in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0

    def new_array(self, length: int, dtype: Any) -> np.memmap:
        """Return an array in a new file.

        Raises:
            OSError: there is no room for it. Without asking for the room first, the process would
                be killed by a bus error when it writes.
        """
        path = self._folder / f"{self._number}.array"
        self._number += 1
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, length * np.dtype(dtype).itemsize)
        return np.memmap(path, dtype, "r+")

    def write(self, compute: Callable[[NewArray], Sequence[np.ndarray]]) -> list[tuple[str, str]]:
        """Return (path, type) of each array that `compute` returns.

        Raises:
            OSError: there is no room for them.
        """
        files = []
        for array in compute(self.new_array):
            if not isinstance(array, np.memmap):
                shared = self.new_array(len(array), array.dtype)
                shared[:] = array
                array = shared
            files.append((str(array.filename), str(array.dtype)))
        return files
