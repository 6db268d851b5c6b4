# SPDX-License-Identifier: Apache-2.0
"""Boxes of whole tensors: what a rank has of them, and what a file has, whatever the strategy.

A plain tensor is one box, a DTensor's shard one or a few, and the flat slices of FSDP1 and ZeRO are
a few boxes.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

# What torch.compile, activation checkpointing and FSDP1 insert into the names of weights
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True)
class LocalBox:
    """A box of a whole tensor that this rank has.

    Attributes:
        name: of the tensor: NAME for a trained weight, state.NAME.KEY for the optimizer's state of
            it (KEY is exp_avg, exp_avg_sq, step for AdamW), buffer.NAME for a running statistic.
        shape: of the whole tensor.
        start: where the box begins in it, one number per dimension.
        part: the tensor that holds the box, which shares the memory of the engine's.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    part: torch.Tensor


@dataclass(frozen=True)
class SavedBox:
    """A box of a whole tensor in a file: under `key`, `sizes` numbers from `start` on."""

    file: str
    key: str
    start: Sequence[int]
    sizes: Sequence[int]


@dataclass(frozen=True)
class FlatSlice:
    """The slice of a flattened tensor that a rank has: `length` numbers from `start` on.

    Attributes:
        shape: of the whole tensor.
    """

    shape: tuple[int, ...]
    start: int
    length: int


@dataclass(frozen=True)
class State:
    """The boxes of this rank, and what has to be called once they have been filled."""

    boxes: list[LocalBox]
    after_fill: Callable[[], None]


def clean_name(name: str) -> str:
    """Return a weight's name without what wrappers insert; DDP and DeepSpeed add module."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


# ---- What a rank has ----
def boxes_of(name: str, tensor: Any, part: FlatSlice | None = None) -> Iterator[LocalBox]:
    """Yield the boxes of a tensor that this rank has.

    Args:
        part: if the tensor is a flat slice of the whole one, where that is; it may be empty.
    """
    tensor = tensor.detach()
    if part is not None:
        yield from boxes_of_slice(name, tensor, part)
    elif not isinstance(tensor, DTensor):
        yield LocalBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)
    elif tensor.device_mesh.get_coordinate() is not None:
        yield from boxes_of_shard(name, tensor)


def boxes_of_shard(name: str, tensor: DTensor) -> Iterator[LocalBox]:
    """Yield the boxes of a shard: several where ranks have numbers of a dimension in turn.

    The gate and up projections of experts are one matrix, and each rank has a part of either.
    """
    runs = [runs_of(tensor, dimension) for dimension in range(tensor.dim())]
    for places in itertools.product(*runs):
        start = tuple(first for first, _ in places)
        part = tensor.to_local()[tuple(here for _, here in places)]
        yield LocalBox(name, tuple(tensor.shape), start, part)


def runs_of(tensor: DTensor, dimension: int) -> list[tuple[int, slice]]:
    """Return each run of a dimension that a shard has: its first number, and its place there."""
    numbers = torch.arange(tensor.shape[dimension])
    for axis, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dimension:
            factor = getattr(placement, "split_factor", None)
            split = _StridedShard(0, split_factor=factor) if factor else Shard(0)
            size = tensor.device_mesh.size(axis)
            parts, _ = split._split_tensor(numbers, size, with_padding=False, contiguous=False)
            numbers = parts[tensor.device_mesh.get_local_rank(axis)]
    ends = (numbers.diff() != 1).nonzero().flatten() + 1
    edges = itertools.pairwise([0, *ends.tolist(), len(numbers)])
    return [(int(numbers[begin]), slice(begin, end)) for begin, end in edges if begin < end]


def boxes_of_slice(name: str, tensor: torch.Tensor, part: FlatSlice) -> Iterator[LocalBox]:
    """Yield the boxes that make up a flat slice of a whole tensor."""
    if part.length == 0:
        return
    rest = tensor.view(-1)
    for start, sizes in cut_into_boxes(part.start, part.start + part.length, part.shape):
        number = math.prod(sizes)
        yield LocalBox(name, part.shape, start, rest[:number].view(sizes))
        rest = rest[number:]


def cut_into_boxes(
    first: int, stop: int, shape: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (start, sizes) of the boxes that hold the numbers of a tensor from `first` to `stop`.

    They are in the order of the numbers, at most 2 n - 1 for n dimensions.

    Args:
        shape: of the tensor, whose numbers are counted row by row.
    """
    if len(shape) <= 1:
        yield (first,) * len(shape), (stop - first,) * len(shape)
        return
    row = math.prod(shape[1:])
    while first < stop:
        number = first // row
        if first % row == 0 and stop - first >= row:
            rows = (stop - first) // row
            yield (number, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            first += rows * row
            continue
        end = min(stop, (number + 1) * row)  # Of this row, of which only a part is meant
        for start, sizes in cut_into_boxes(first - number * row, end - number * row, shape[1:]):
            yield (number, *start), (1, *sizes)
        first = end


def overlap(source: SavedBox, box: LocalBox) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return where two boxes have the same numbers, as slices of each, or None if nowhere."""
    inside = []
    here = []
    places = zip(source.start, source.sizes, box.start, box.part.shape, strict=True)
    for saved_start, saved_size, start, size in places:
        first = max(saved_start, start)
        stop = min(saved_start + saved_size, start + size)
        if first >= stop:
            return None
        inside.append(slice(first - saved_start, stop - saved_start))
        here.append(slice(first - start, stop - start))
    return tuple(inside), tuple(here)


# ---- Numbers ----
class Numbers:
    """Entries of optimizer state that are plain numbers, as tensors that can be filled."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, torch.Tensor]] = []

    def as_tensor(self, holder: Any, key: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """Return an entry of a mapping as a tensor.

        Args:
            shape: of the part of a weight that this rank has. State of another shape, such as the
                scales of blocks in 8 bits, is of no box of the whole weight.

        Raises:
            TypeError: if it is neither a tensor of that shape nor a number.
        """
        value = holder[key]
        if isinstance(value, int | float):
            tensor = torch.tensor(value)
            self._places.append((holder, key, tensor))
            return tensor
        is_tensor = isinstance(value, torch.Tensor)
        if not is_tensor or (value.dim() > 0 and shape not in (None, value.shape)):
            raise TypeError(f"the optimizer's state {key} is no number nor of its weight's shape")
        return value

    def put_back(self) -> None:
        """Set the entries that are numbers to what their tensors were filled with."""
        for holder, key, tensor in self._places:
            holder[key] = type(holder[key])(tensor.item())
