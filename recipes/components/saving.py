# SPDX-License-Identifier: Apache-2.0
"""All ranks write a checkpoint together: each owner its tensors, and rank 0 the rest."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from components import checkpoint
from components.exits import Exit
from components.state import first_nonfinite


def publish(
    accelerator: Accelerator,
    folder: Path,
    share: Mapping[str, torch.Tensor],
    progress: Mapping[str, Any],
    limit: int,
    kept_step: int | None = None,
) -> tuple[int, str]:
    """Write a checkpoint, and delete all but the newest `limit`. Every rank takes part.

    Args:
        share: the tensors that this rank owns, as `gather_state` returns them.
        kept_step: the step of a checkpoint that is kept in any case.

    Returns:
        On every rank the code with which the run has to end and why, or Exit.DONE and "". Earlier
        checkpoints are then unchanged.
    """
    step = progress["step"]
    found = gather_object([(checkpoint.size_of_state(share), first_nonfinite(share))])
    for _, broken in found:
        if broken is not None:
            problem = f"{broken} is not finite after step {step}: no checkpoint is made"
            return Exit.NOT_FINITE, problem
    sizes = [size for size, _ in found]
    problem = None
    if accelerator.is_main_process:
        problem = begin(folder, step, sum(sizes))
    problem = broadcast_object_list([problem])[0]
    if problem is None:
        files = files_of_owners(sizes)
        file = files.get(accelerator.process_index)
        reports = gather_object([write_share(folder, step, file, share)])
        if accelerator.is_main_process:
            problem = complete(folder, progress, reports, limit, kept_step)
        problem = broadcast_object_list([problem])[0]
    if problem is None:
        return Exit.DONE, ""
    free = shutil.disk_usage(folder).free
    return Exit.CANNOT_WRITE, (
        f"the checkpoint after step {step} could not be finished: {problem}: it needs "
        f"{sum(sizes):,} bytes, {free:,} are free in {folder}; older checkpoints, if there are "
        "any, are whole"
    )


def files_of_owners(sizes: list[int]) -> dict[int, str]:
    """Return {rank: name of its file} for the ranks that own tensors.

    Args:
        sizes: the bytes that each rank owns.
    """
    owners = [rank for rank, size in enumerate(sizes) if size > 0]
    return dict(zip(owners, checkpoint.state_files(len(owners)), strict=True))


def begin(folder: Path, step: int, nbytes: int) -> str | None:
    """Make the staging folder. Returns why that failed, or None."""
    try:
        checkpoint.begin(folder, step, nbytes)
    except OSError as error:
        discard(folder, step)
        return str(error)
    return None


def write_share(
    folder: Path, step: int, file: str | None, share: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], str | None]:
    """Write this rank's tensors.

    Args:
        file: the name of its file; None if it has no tensors.

    Returns:
        {file: what the manifest says about it} and None, or {} and why it could not be written.
    """
    if file is None:
        return {}, None
    path = checkpoint.staging_folder(folder, step) / file
    try:
        return {file: checkpoint.write_part(path, share)}, None
    except (OSError, SafetensorError) as error:
        return {}, str(error)


def complete(
    folder: Path,
    progress: Mapping[str, Any],
    reports: list[tuple[dict[str, Any], str | None]],
    limit: int,
    kept_step: int | None,
) -> str | None:
    """Give the checkpoint its name, on rank 0, if all owners have written their files.

    Args:
        reports: the results of `write_share` of all ranks.

    Returns:
        Why it cannot be finished, in which case nothing is left of it, or None.
    """
    problems = [problem for _, problem in reports if problem is not None]
    problem = problems[0] if problems else None
    if problem is None:
        written = {}
        for facts, _ in reports:
            written |= facts
        try:
            checkpoint.complete(folder, progress, written, limit, kept_step)
        except OSError as error:
            problem = str(error)
    if problem is not None:
        discard(folder, progress["step"])
    return problem


def discard(folder: Path, step: int) -> None:
    """Delete what has been staged of a checkpoint."""
    shutil.rmtree(checkpoint.staging_folder(folder, step), ignore_errors=True)
