# SPDX-License-Identifier: Apache-2.0
"""All ranks write a checkpoint together: each owner its tensors, and rank 0 the rest.

A thread of each rank writes, hashes and flushes files, and never communicates. What the ranks have
to tell each other, their main threads say in calls that every rank makes. So the same code saves
while a run waits and, with --async_save, while it trains.
"""

import contextlib
import copy
import enum
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object
from safetensors import SafetensorError

from components import checkpoint
from components.ending import Problem
from components.exits import Exit
from components.long_calls import wait_for_every_rank
from components.object_store import ObjectStore
from components.state import first_nonfinite
from components.write_errors import WriteError

# What the manifest says about the files that a rank has written, and why it could not write
Written = tuple[dict[str, Any], WriteError | None]
# Bytes per second that every disk takes from all ranks together. Once it should have written a
# checkpoint, waiting for it is no sign of life any more: the disk, or its server, does not answer.
SLOWEST_DISK = 50_000_000


class Phase(enum.Enum):
    """What the threads of all ranks do for a checkpoint: all end a phase before the next begins."""

    WRITING = enum.auto()  # Each owner writes its tensors.
    PUBLISHING = enum.auto()  # Rank 0 gives the checkpoint its name; the others do nothing.


class Vote(NamedTuple):
    """What a rank says of its thread between steps. The votes of all ranks are added up.

    Attributes:
        phases_ended: those that its thread has ended so far, of all checkpoints.
        failures: 1 if the last of them failed.
    """

    phases_ended: int
    failures: int


@dataclass
class PendingSave:
    """A checkpoint under way.

    Attributes:
        progress: the content of its progress.json.
        nbytes: of the tensors of all owners.
        kept_step: the step of a checkpoint that is kept in any case.
        work: what this rank's thread does for it in this phase.
        began: when this phase began, in seconds of time.monotonic().
    """

    progress: Mapping[str, Any]
    nbytes: int
    kept_step: int | None
    work: Future[Written]
    phase: Phase = Phase.WRITING
    began: float = field(default_factory=time.monotonic)

    @property
    def is_in_time(self) -> bool:
        """Whether a slow disk can explain that this phase has not ended."""
        return time.monotonic() - self.began < self.nbytes / SLOWEST_DISK


class Saver:
    """Makes the checkpoints of a run, one at a time. Every rank makes every call."""

    def __init__(
        self, folder: Path, limit: int, store: ObjectStore | None, show_life: Callable[[], None]
    ) -> None:
        """Know where checkpoints go.

        Args:
            folder: of the run.
            limit: the newest checkpoints to keep.
            store: where a copy of them goes.
            show_life: tells the watch over this rank that it does not hang, but waits for a disk.
        """
        self._folder = folder
        self._limit = limit
        self._store = store
        self._show_life = show_life
        self._thread = ThreadPoolExecutor(1, "saver")
        self._phases_begun = 0  # by this rank's thread, for all checkpoints
        self._pending: PendingSave | None = None
        self._kept_step: int | None = None  # What the newest checkpoint was saved with

    def start(
        self,
        accelerator: Accelerator,
        share: Mapping[str, torch.Tensor],
        progress: Mapping[str, Any],
        kept_step: int | None = None,
    ) -> Problem | None:
        """Begin to write a checkpoint; `finish` or `advance` end it.

        Args:
            share: the tensors that this rank owns, as `gather_state` returns them. They must not
                change until the checkpoint is finished.
            kept_step: the step of a checkpoint that is kept in any case.

        Returns:
            On every rank why there cannot be such a checkpoint, or None.
        """
        assert self._pending is None, "finish the checkpoint before this one first"
        step = progress["step"]
        found = gather_object([(checkpoint.size_of_state(share), first_nonfinite(share))])
        for _, broken in found:
            if broken is not None:
                problem = f"{broken} is not finite after step {step}: no checkpoint is made"
                return Exit.NOT_FINITE, problem
        sizes = [size for size, _ in found]
        problem = None
        if accelerator.is_main_process:
            problem = try_to_make_staging_folder(self._folder, step, sum(sizes))
        problem = broadcast_object_list([problem])[0]
        if problem is not None:
            return self._describe(step, sum(sizes), problem)
        file = files_of_owners(sizes).get(accelerator.process_index)
        work = self._begin_phase(write_share, self._folder, step, file, share)
        # The run may continue and change what its progress consists of.
        self._pending = PendingSave(copy.deepcopy(progress), sum(sizes), kept_step, work)
        return None

    def keep(self, step: int) -> None:
        """Keep the checkpoint of a step, as an earlier call has decided, until the next save."""
        self._kept_step = step

    def vote(self) -> Vote:
        """Return what `advance` has to know the sums of."""
        if self._pending is None:
            return Vote(self._phases_begun, 0)
        work = self._pending.work
        if not work.done():
            return Vote(self._phases_begun - 1, 0)
        has_failed = work.exception() is not None or work.result()[1] is not None
        return Vote(self._phases_begun, int(has_failed))

    def advance(self, accelerator: Accelerator, sums: Sequence[int]) -> Problem | None:
        """Take the checkpoint under way further if no rank's thread has to be waited for.

        If a rank could not write, the others are waited for, since the run ends.

        Args:
            sums: of the votes of all ranks, the same on each. They may be those of an earlier step,
                since phases that have ended are never fewer than before.

        Returns:
            On every rank why the checkpoint could not be finished, or None.
        """
        phases_ended, failures = sums
        has_ended = phases_ended == accelerator.num_processes * self._phases_begun
        if self._pending is None or not (has_ended or failures):
            return None
        return self._end_phase(accelerator, self._pending)

    def finish(self, accelerator: Accelerator) -> Problem | None:
        """Wait until the checkpoint under way is whole.

        Returns:
            On every rank why it could not be finished, or None.
        """
        problem = None
        while self._pending is not None:
            problem = self._end_phase(accelerator, self._pending)
        return problem

    def _begin_phase(self, function: Callable[..., Written], *arguments: Any) -> Future[Written]:
        """Have this rank's thread call a function."""
        self._phases_begun += 1
        return self._thread.submit(function, *arguments)

    def _end_phase(self, accelerator: Accelerator, save: PendingSave) -> Problem | None:
        """Wait for the threads of all ranks; have rank 0 publish what all have written."""
        step = save.progress["step"]
        written = {}
        problems = []
        for facts, problem in self._wait_for_threads(save):
            written |= facts
            if problem is not None:
                problems.append(problem)
        if problems:
            self._pending = None
            ending = self._describe(step, save.nbytes, problems[0])  # while the disk is full
            if accelerator.is_main_process:
                discard(self._folder, step)
            return ending
        match save.phase:
            case Phase.WRITING:
                save.phase = Phase.PUBLISHING
                save.began = time.monotonic()
                publish = self._publish if accelerator.is_main_process else do_nothing
                save.work = self._begin_phase(publish, save, written)
            case Phase.PUBLISHING:
                self._pending = None
        return None

    def _wait_for_threads(self, save: PendingSave) -> list[Written]:
        """Return what the threads of all ranks return, which may take longer than --ddp_timeout."""

        def show_life_in_time() -> None:
            if save.is_in_time:
                self._show_life()

        return wait_for_every_rank(save.work, show_life_in_time)

    def _publish(self, save: PendingSave, written: Mapping[str, Any]) -> Written:
        """Give the checkpoint its name, and begin to upload it. Rank 0's thread calls it.

        One that is still being uploaded is not deleted, however old it is.
        """
        self._kept_step = save.kept_step
        kept_steps = {save.kept_step}
        try:
            checkpoint.publish(self._folder, save.progress, written)
            if self._store is not None:
                path = self._folder / f"checkpoint-{save.progress['step']}"
                self._store.start_upload(path, self._limit, save.kept_step)
                kept_steps |= self._store.steps_to_upload()
            checkpoint.delete_old(self._folder, self._limit, kept_steps)
        except OSError as error:
            return {}, WriteError.of(error)
        return {}, None

    def finish_uploads(self, is_done: bool) -> Problem | None:
        """Wait until uploads have ended. Only rank 0 calls it, once no save is under way.

        Args:
            is_done: whether the result is uploaded too.

        Returns:
            Why the result could not be uploaded, or None.
        """
        assert self._store is not None
        problem = self._store.upload_the_rest(is_done)
        with contextlib.suppress(OSError):  # It would only take room.
            checkpoint.delete_old(self._folder, self._limit, {self._kept_step})
        return problem

    def _describe(self, step: int, nbytes: int, problem: WriteError) -> Problem:
        """Return how a run ends whose checkpoint cannot be written."""
        return Exit.CANNOT_WRITE, (
            f"the checkpoint after step {step} could not be finished: "
            f"{problem.describe(self._folder, nbytes)}; older checkpoints, if there are any, were "
            "not touched"
        )


def files_of_owners(sizes: list[int]) -> dict[int, str]:
    """Return {rank: name of its file} for the ranks that own tensors.

    Args:
        sizes: the bytes that each rank owns.
    """
    owners = [rank for rank, size in enumerate(sizes) if size > 0]
    return dict(zip(owners, checkpoint.state_files(len(owners)), strict=True))


def try_to_make_staging_folder(folder: Path, step: int, nbytes: int) -> WriteError | None:
    """Make the staging folder. Returns why that failed, or None."""
    try:
        checkpoint.make_staging_folder(folder, step, nbytes)
    except OSError as error:
        discard(folder, step)
        return WriteError.of(error)
    return None


def write_share(
    folder: Path, step: int, file: str | None, share: Mapping[str, torch.Tensor]
) -> Written:
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
        return {}, WriteError.of(error)


def do_nothing(*arguments: Any) -> Written:
    """Do what the other ranks have to do while rank 0 publishes a checkpoint."""
    return {}, None


def discard(folder: Path, step: int) -> None:
    """Delete what has been staged of a checkpoint."""
    shutil.rmtree(checkpoint.staging_folder(folder, step), ignore_errors=True)
