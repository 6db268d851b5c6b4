# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as files. Once one is written, there is a whole one at every instant.

    OUTPUT_DIR/checkpoint-STEP/state-00001.safetensors
                                              what one rank wrote of the trained weights and the
                                              optimizer's state
                               boxes.json     where in which file each box of a tensor is
                               progress.json  steps done, schedule, arguments of the run, ranks
                               manifest.json  size and hash of the other files; written last

Every rank writes the boxes that it has (core/state.py) into a staging folder and flushes them.
Then rank 0 gives the folder its name, and only then deletes old ones. A rank that resumes reads the
boxes that overlap its own from whichever files have them, so that neither the strategy nor the
number of ranks has to be the one that saved. Nothing is gathered, and nothing is unpickled.
"""

import copy
import errno
import json
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from core.boxes import LocalBox, SavedBox, State, overlap
from core.exits import End, Exit

MANIFEST = "manifest.json"
BOXES = "boxes.json"  # Checkpoints of earlier versions have none: their tensors are whole
PROGRESS = "progress.json"
VERSION = 2  # of the format of boxes.json
EARLIER = "__bnb_optimizer_quant_state__."  # What names of 8-bit state had in them before
NAME = re.compile(r"checkpoint-([0-9]{1,18})")
STAGING = ".staging"  # Ends the name of a checkpoint that is being written or deleted
# Bytes per second that every disk takes from all ranks together; a slower one does not answer
SLOWEST_DISK = 50_000_000

# What `write` returns
Written = tuple[dict[str, Any], list[tuple[str, list[int], Any]]]


T = TypeVar("T")


# ---- Ranks that may wait for long ----
def make_patient_group() -> Any:
    """Return a process group on the host whose calls may take days; None with one process."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    return dist.new_group(backend="gloo", timeout=timedelta(days=7))


def gather(mine: Any, group: Any) -> list[Any]:
    """Return what each rank gives, by rank. Every rank takes part."""
    if group is None:
        return [mine]
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return found


def on_rank_0(function: Callable[[], T], group: Any) -> T:
    """Return on every rank what a function returns on rank 0, or raise the End that it raises.

    Every rank takes part, however long it takes; the function must not communicate with others.
    """
    found: Any = None
    if group is None or dist.get_rank(group) == 0:
        try:
            found = function()
        except End as end:
            found = end
    found = gather(found, group)[0]
    if isinstance(found, End):
        raise found
    return found


# ---- Finding ----
def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return {step: folder} of all folders that are named as checkpoints, the newest first."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def candidates_in(folder: Path, requested: str) -> list[Path]:
    """Return the checkpoints from which a run may continue, in the order in which they are tried.

    Args:
        requested: --resume_from_checkpoint: auto, none, or a checkpoint's folder.
    """
    own = list(checkpoints_in(folder).values())
    if requested == "auto":
        return own
    if requested == "none":
        return []
    if Path(requested).resolve().parent == folder.resolve():
        return [Path(requested)]
    # The run begins from another folder's checkpoint, but may have written its own since
    return [*own, Path(requested)]


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's progress.json."""
    return json.loads((checkpoint / PROGRESS).read_text())


def find_damage(checkpoint: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Return why a checkpoint cannot be trusted, or None if it can.

    Each of its files must have the size and the hash of the manifest.

    Args:
        rank: look only at the files that this rank of `num_ranks` looks at.

    Raises:
        OSError: if a file cannot be read now, which says nothing of the checkpoint: a disk may
            only be away for a while.
    """
    name = MANIFEST
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        for name in sorted({*manifest, PROGRESS})[rank::num_ranks]:
            file = checkpoint / name
            written = manifest[name]
            if file.stat().st_size != written["size"] or hash_of(file) != written["xxh3_128"]:
                return f"{name} is not what was written"
    except (FileNotFoundError, IsADirectoryError):
        return f"{name} is missing"
    except (ValueError, LookupError, TypeError):
        return f"{name} is damaged"
    return None


def hash_of(file: Path) -> str:
    """Return a file's hash of 128 bits (xxh3), which reveals damage but not forgery."""
    return xxhash.xxh3_128_hexdigest(np.memmap(file, mode="r").data)


def set_aside(damaged: Iterable[Path]) -> None:
    """Rename checkpoints: the run needs their names when it reaches their steps again."""
    for path in damaged:
        path.rename(f"{path}.damaged-{time.time_ns()}")


# ---- Reading ----
@dataclass
class SavedTensor:
    """A tensor of a checkpoint: its whole shape, and the boxes that make it up."""

    shape: Sequence[int]
    boxes: list[SavedBox] = field(default_factory=list)


def saved_tensors(checkpoint: Path) -> dict[str, SavedTensor]:
    """Return {name: where it is} of all tensors of a checkpoint, whatever version wrote it.

    Raises:
        ValueError: if a newer version wrote it.
    """
    found: dict[str, SavedTensor] = {}
    if (checkpoint / BOXES).is_file():
        content = json.loads((checkpoint / BOXES).read_text())
        if content["version"] > VERSION:
            raise ValueError(f"{checkpoint} is of newer recipes: continue with those")
        for name, tensor in content["tensors"].items():
            boxes = [SavedBox(*box) for box in tensor["boxes"]]
            found[name.replace(EARLIER, "")] = SavedTensor(tensor["shape"], boxes)
        return found
    for file in sorted(path.name for path in checkpoint.glob("state*.safetensors")):
        with safe_open(checkpoint / file, "pt") as reader:
            for name in reader.keys():
                shape = reader.get_slice(name).get_shape()
                whole = SavedBox(file, name, [0] * len(shape), shape)
                found[name.replace(EARLIER, "")] = SavedTensor(shape, [whole])
    return found


def fill(
    state: State, checkpoint: Path, saved: Mapping[str, SavedTensor], group: Any = None
) -> None:
    """Fill the boxes of this rank from a checkpoint, in place. Every rank takes part.

    It takes no memory beside them but that of one box. All ranks end with 65 if the names, the
    shapes or the kinds of numbers differ.
    """
    own = [box.name for box in state.boxes]
    names = set().union(*gather(own, group))
    problem = None
    if names != saved.keys():
        problem = f"not all of it is of this model: {sorted(names ^ saved.keys())[:3]}"
    else:
        try:
            fill_boxes(state.boxes, checkpoint, saved)
        except ValueError as error:
            problem = str(error)
    problems = [found for found in gather(problem, group) if found]
    if problems:
        raise End(Exit.DATA, f"{checkpoint}: {problems[0]}: it cannot be continued")
    state.after_fill()


def fill_weights(state: State, checkpoint: Path, group: Any = None) -> None:
    """Fill all but the optimizer's state from a checkpoint. Every rank takes part."""
    boxes = [box for box in state.boxes if not is_of_optimizer(box.name)]
    saved = {}
    for name, tensor in saved_tensors(checkpoint).items():
        if not is_of_optimizer(name):
            saved[name] = tensor
    fill(State(boxes, state.after_fill), checkpoint, saved, group)


def is_of_optimizer(name: str) -> bool:
    """Return whether a tensor of a checkpoint is of the optimizer's state."""
    return name.startswith("state.")


def fill_boxes(
    boxes: Sequence[LocalBox], checkpoint: Path, saved: Mapping[str, SavedTensor]
) -> None:
    """Fill boxes from the files that have their numbers, each of which is opened once.

    Raises:
        ValueError: if a tensor has another shape or another kind of numbers.
    """
    wanted: dict[str, list[tuple[str, tuple[slice, ...], torch.Tensor]]] = {}
    for box in boxes:
        tensor = saved[box.name]
        if list(box.shape) != list(tensor.shape):
            raise ValueError(f"{box.name} has the shape {tensor.shape}, not {[*box.shape]}")
        missing = box.part.numel()
        for source in tensor.boxes:
            both = overlap(source, box)
            if both is not None:
                inside, here = both
                target = box.part[here]
                wanted.setdefault(source.file, []).append((source.key, inside, target))
                missing -= target.numel()
        if missing:
            raise ValueError(f"it has not all of {box.name}")
    for file, reads in wanted.items():
        with safe_open(checkpoint / file, "pt") as reader:
            for key, inside, target in reads:
                data = reader.get_slice(key)[inside]
                # Programs count steps in integers or in floating point
                if data.dtype != target.dtype and target.dim() > 0:
                    raise ValueError(f"{key} is in {data.dtype}, not in {target.dtype}")
                target.copy_(data.view(target.shape))


def read_whole(
    checkpoint: Path, names: Collection[str] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of a checkpoint, one tensor after another: all, or those named."""
    for name, tensor in saved_tensors(checkpoint).items():
        if names is not None and name not in names:
            continue
        whole = None
        for box in tensor.boxes:
            with safe_open(checkpoint / box.file, "pt") as reader:
                data = reader.get_tensor(box.key)
            if whole is None:
                whole = torch.empty(tensor.shape, dtype=data.dtype)
            place = zip(box.start, box.sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in place)] = data
        assert whole is not None, name
        yield name, whole


# ---- Writing ----
class Checkpoints:
    """Writes the checkpoints of a run, one at a time. Every rank makes every call.

    All ranks end with 73 if one cannot be written; older ones are not touched.
    """

    def __init__(
        self,
        folder: Path,
        limit: int,
        group: Any = None,
        published: Callable[[Path], Collection[int]] = lambda path: (),
    ) -> None:
        """Know where checkpoints go.

        Args:
            limit: the newest checkpoints to keep.
            published: what rank 0 calls with each new checkpoint; it returns the steps of others
                that are to be kept.
        """
        self._folder = folder
        self._limit = limit
        self._group = group
        self._published = published
        self._rank = 0 if group is None else dist.get_rank(group)
        self._thread = ThreadPoolExecutor(1, "saver")
        self._work: Future[Written] | None = None
        self._progress: dict[str, Any] = {}
        self.nbytes = 0  # Of the newest checkpoint, from all ranks

    @property
    def step(self) -> int:
        """The step of the newest checkpoint, which may be under way or have failed."""
        return self._progress["step"]

    @property
    def seconds_at_most(self) -> float:
        """In which every disk writes the newest checkpoint."""
        return self.nbytes / SLOWEST_DISK

    def begin(self, boxes: Sequence[LocalBox], progress: Mapping[str, Any]) -> None:
        """Begin to write a checkpoint of copies of these boxes; `finish` ends it.

        All ranks end with 70 if a number is not finite.
        """
        assert self._work is None, "finish the checkpoint before this one first"
        step = progress["step"]
        self._progress = copy.deepcopy(dict(progress))  # The run may go on and change it
        own, self.nbytes = share_of(boxes, self._rank, self._group)
        copies = [copied(box) for box in own]
        broken = [box.name for box in copies if not is_finite(box.part)]
        for names in gather(broken, self._group):
            if names:
                problem = f"{names[0]} is not finite"
                raise End(Exit.NOT_FINITE, f"{problem} after step {step}: no checkpoint is made")
        self._on_rank_0(self._make_staging_folder)
        self._work = self._thread.submit(
            write, staging_of(self._folder, step), self._rank + 1, copies
        )

    @property
    def has_ended(self) -> bool:
        """Whether this rank's part of the checkpoint under way is written, or has failed."""
        return self._work is not None and self._work.done()

    def finish(self) -> None:
        """Wait until all ranks have written what is under way, if any, and give it its name."""
        if self._work is None:
            return
        mine: Written | OSError
        try:
            mine = self._work.result()
        except OSError as error:
            mine = error
        self._work = None
        found = gather(mine, self._group)

        def publish_and_delete() -> None:
            for written in found:
                if isinstance(written, OSError):
                    raise written
            path = publish(self._folder, self._progress, found)
            delete_old(self._folder, self._limit, self._published(path))

        self._on_rank_0(publish_and_delete)

    def _make_staging_folder(self) -> None:
        """Make the folder into which all ranks write."""
        if self.nbytes > shutil.disk_usage(self._folder).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._folder))
        staging_of(self._folder, self.step).mkdir()

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        """Have rank 0 do something. If it cannot, all ranks end with 73, and nothing is left."""

        def work_or_end() -> None:
            try:
                work()
            except OSError as error:
                shutil.rmtree(staging_of(self._folder, self.step), ignore_errors=True)
                raise End(
                    Exit.CANNOT_WRITE,
                    f"the checkpoint after step {self.step} could not be finished: {error}; older "
                    "checkpoints, if there are any, were not touched",
                ) from error

        on_rank_0(work_or_end, self._group)


def share_of(boxes: Sequence[LocalBox], rank: int, group: Any) -> tuple[list[LocalBox], int]:
    """Return the boxes that this rank writes, and the bytes that all ranks write.

    Each box is written once: the largest first, by the rank with the least to write of those that
    have it. Statistics of BatchNorm, which differ by rank, are the first rank's. Every rank takes
    part.
    """
    holders: dict[tuple[int, str, tuple[int, ...]], list[int]] = {}
    mine = [(box.part.nbytes, box.name, box.start) for box in boxes]
    for number, found in enumerate(gather(mine, group)):
        for key in found:
            holders.setdefault(key, []).append(number)
    loads: Counter[int] = Counter()
    own = set()
    for key in sorted(holders, reverse=True):
        nbytes, name, start = key
        owner = holders[key][0]
        if not name.startswith("buffer."):
            owner = min(holders[key], key=lambda number: loads[number])
        loads[owner] += nbytes
        if owner == rank:
            own.add((name, start))
    return [box for box in boxes if (box.name, box.start) in own], loads.total()


def copied(box: LocalBox) -> LocalBox:
    """Return a box whose numbers are copied to the host, where no later step changes them."""
    part = box.part.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return LocalBox(box.name, box.shape, box.start, part)


def is_finite(part: torch.Tensor) -> bool:
    """Return whether all numbers are finite. The sum, thirty times as fast, usually says so."""
    if not part.is_floating_point() or part.sum().isfinite():
        return True
    return bool(part.isfinite().all())


def write(staging: Path, number: int, boxes: Sequence[LocalBox]) -> Written:
    """Write the boxes of one rank into the file of this number, and flush it. Raises OSError.

    Returns:
        What the manifest says of the file, and of each box its tensor's name and whole shape, and
        what boxes.json says of it.
    """
    if not boxes:
        return {}, []
    path = staging / f"state-{number:05d}.safetensors"
    tensors = {}
    described = []
    for box in boxes:
        key = box.name
        if tuple(box.part.shape) != box.shape:
            key = f"{box.name}@{','.join(map(str, box.start))}"
        tensors[key] = box.part.contiguous()
        place = (path.name, key, [*box.start], [*box.part.shape])
        described.append((box.name, [*box.shape], place))
    try:
        save_file(tensors, path)
    except SafetensorError as error:  # It has its own for a full disk
        raise OSError(str(error)) from error
    let_others_read(path)
    flush(path)
    return {path.name: facts_of(path)}, described


def facts_of(file: Path) -> dict[str, Any]:
    """Return what the manifest says of a file."""
    return {"size": file.stat().st_size, "xxh3_128": hash_of(file)}


def publish(folder: Path, progress: Mapping[str, Any], written: Sequence[Written]) -> Path:
    """Make a checkpoint of what each rank has written. Returns its folder."""
    staging = staging_of(folder, progress["step"])
    manifest: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    for facts, described in written:
        manifest |= facts
        for name, shape, place in described:
            tensors.setdefault(name, {"shape": shape, "boxes": []})["boxes"].append(place)
    (staging / BOXES).write_text(json.dumps({"version": VERSION, "tensors": tensors}))
    (staging / PROGRESS).write_text(json.dumps(progress, indent=2))
    manifest |= {name: facts_of(staging / name) for name in (BOXES, PROGRESS)}
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2))
    for path in (staging / BOXES, staging / PROGRESS, staging / MANIFEST, staging):
        flush(path)
    final = folder / f"checkpoint-{progress['step']}"
    staging.rename(final)
    flush(folder)
    return final


def delete_old(folder: Path, limit: int, kept_steps: Collection[int | None]) -> None:
    """Delete all but the newest `limit` checkpoints and those of `kept_steps`.

    The new name has a run that is killed meanwhile delete the rest when it resumes.
    """
    existing = checkpoints_in(folder)
    ours = [step for step, path in existing.items() if (path / MANIFEST).is_file()]
    for step in ours[limit:]:
        if step not in kept_steps:
            doomed = staging_of(folder, step)
            existing[step].rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def staging_of(folder: Path, step: int) -> Path:
    """Return where a checkpoint is while it is written or deleted."""
    return folder / f"checkpoint-{step}{STAGING}"


def let_others_read(file: Path) -> None:
    """Give a file of safetensors, which only its owner can read, the permissions of its folder."""
    file.chmod(file.parent.stat().st_mode & 0o666)


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
