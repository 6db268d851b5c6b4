# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed trains, as boxes: core/state.py imports this where DeepSpeed is in force.

ZeRO-1 to 3 hold flat fp32 parts of the weights and of the optimizer's moments of them. In bf16 and
fp16, ZeRO-0 has an fp32 master weight for each weight. The names are those of other strategies.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from core import workarounds
from core.state import (
    FlatSlice,
    LocalBox,
    Numbers,
    State,
    boxes_of,
    clean_name,
    state_of_optimizer,
)

Shapes = Mapping[str, Sequence[int]]


def state_of_engine(engine: Any, zero: Any, saved: Shapes | None) -> State:
    """Return the state of a DeepSpeed engine on this rank, as `state_of` does.

    Args:
        zero: DeepSpeed's optimizer.
    """
    weights = {}
    for name, weight in engine.named_parameters():
        if weight.requires_grad:
            weights[clean_name(name)] = weight
    if engine.zero_optimization_stage() == 3:
        return state_of_third(zero, weights, saved)
    if engine.zero_optimization_stage() > 0:
        return state_of_parts(zero, weights, saved)
    masters = master_weights(zero)
    if masters:
        return state_of_masters(zero.optimizer, weights, masters)
    return state_of_optimizer(engine, getattr(zero, "optimizer", zero), saved)


# ---- ZeRO-0 in bf16 or fp16 ----
def master_weights(zero: Any) -> dict[torch.Tensor, torch.Tensor]:
    """Return {weight: its fp32 master weight} of ZeRO-0 in bf16 or fp16, {} otherwise.

    Args:
        zero: DeepSpeed's optimizer, or any other, which then has no master weights.
    """
    masters = {}
    low_groups = getattr(zero, "fp16_groups", [])
    high_groups = getattr(zero, "fp32_groups", [])
    for low, high in zip(low_groups, high_groups, strict=True):
        masters.update(zip(low, high, strict=True))
    return masters


def state_of_masters(
    optimizer: Any,
    weights: Mapping[str, torch.Tensor],
    masters: Mapping[torch.Tensor, torch.Tensor],
) -> State:
    """Return ZeRO-0's fp32 master weights and their state. Every rank has all of them.

    Args:
        optimizer: the one that DeepSpeed wraps.
    """
    boxes: list[LocalBox] = []
    numbers = Numbers()
    for name, weight in weights.items():
        boxes += boxes_of(name, masters[weight])
        entries = optimizer.state[masters[weight]]
        for key in entries:
            boxes += boxes_of(f"state.{name}.{key}", numbers.as_tensor(entries, key))

    def after_fill() -> None:
        numbers.put_back()
        for weight, master in masters.items():
            weight.data.copy_(master.data)

    return State(boxes, after_fill)


# ---- ZeRO-1 to 3 ----
def state_of_parts(zero: Any, weights: Mapping[str, Any], saved: Shapes | None) -> State:
    """Return the slices of weights and moments that this rank has under ZeRO-1 or 2."""
    flats = zero.single_partition_of_fp32_groups
    if saved is not None:
        make_moments(zero.optimizer, flats, saved)
    workarounds.link_optimizer_states(zero)
    moments, steps = keys_of(zero.optimizer, flats)
    numbers = NumbersOfParts(zero.optimizer, flats, steps)
    boxes: list[LocalBox] = []
    for name, weight in weights.items():
        boxes += numbers.boxes_of(name)
        if weight._hp_mapping is None:
            continue
        address = weight._hp_mapping.lp_fragment_address
        part = FlatSlice(tuple(weight.shape), address.start, address.numel)
        boxes += boxes_of(name, weight._hp_mapping.get_hp_fragment(None), part)
        for key in moments:
            fragment = weight._hp_mapping.get_hp_fragment(key)
            boxes += boxes_of(f"state.{name}.{key}", fragment, part)

    def after_fill() -> None:
        numbers.put_back()
        zero.update_lp_params()

    return State(boxes, after_fill)


def state_of_third(zero: Any, weights: Mapping[str, Any], saved: Shapes | None) -> State:
    """Return the slices of weights and moments that this rank has under ZeRO-3."""
    flats = zero.fp32_partitioned_groups_flat
    if saved is not None:
        make_moments(zero.optimizer, flats, saved)
    moments, steps = keys_of(zero.optimizer, flats)
    numbers = NumbersOfParts(zero.optimizer, flats, steps)
    boxes: list[LocalBox] = []
    for name, weight in weights.items():
        boxes += numbers.boxes_of(name)
        part = slice_of_third(weight)
        for key in (None, *moments):
            whole_name = name if key is None else f"state.{name}.{key}"
            held, _ = zero._get_fp32_opt_state_partition(weight, False, key)
            boxes += boxes_of(whole_name, held[: part.length], part)

    def after_fill() -> None:
        numbers.put_back()
        for number in range(len(flats)):
            zero._reassign_or_swap_out_partitioned_parameters(number)
        small = zero.persistent_parameters  # Every rank keeps these whole
        if small:
            small[0].partition(small)
            small[0].all_gather(small)

    return State(boxes, after_fill)


def slice_of_third(weight: Any) -> FlatSlice:
    """Return the slice of a weight of ZeRO-3 that this rank has, without the padding at its end."""
    size = weight.ds_tensor.numel()
    start = size * dist.get_rank(weight.ds_process_group)
    length = min(max(weight.ds_numel - start, 0), size)
    return FlatSlice(tuple(weight.ds_shape), start, length)


def make_moments(
    optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor], saved: Shapes
) -> None:
    """Give each flat part moments of zeros and numbers of 0, under the keys that were saved.

    Before the first step it has none.
    """
    moments: set[str] = set()
    numbers: set[str] = set()
    for name, shape in saved.items():
        if name.startswith("state."):
            found = moments if len(shape) > 0 else numbers
            found.add(name.rpartition(".")[2])
    for flat in flats:
        entry: dict[str, torch.Tensor] = {}
        for key in sorted(numbers - moments):  # A weight without dimensions has such moments
            entry[key] = torch.zeros((), device=flat.device)
        for key in sorted(moments):
            entry[key] = torch.zeros_like(flat)
        optimizer.state[flat] = entry


def keys_of(
    optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor]
) -> tuple[list[str], list[str]]:
    """Return the keys of an optimizer's moments of flat parts, and of the numbers beside them."""
    moments: dict[str, None] = {}
    numbers: dict[str, None] = {}
    for flat in flats:
        for key, value in optimizer.state.get(flat, {}).items():
            kind = moments if getattr(value, "shape", None) == flat.shape else numbers
            kind[key] = None
    return list(moments), list(numbers)


class NumbersOfParts:
    """The numbers of flat parts, such as the step: a checkpoint has them for each weight.

    All parts have the same, as all are stepped together.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, flats: Sequence[torch.Tensor], keys: Sequence[str]
    ) -> None:
        self._entries = [optimizer.state[flat] for flat in flats if flat in optimizer.state]
        self._filled = {key: torch.tensor(float(self._entries[0][key])) for key in keys}

    def boxes_of(self, name: str) -> list[LocalBox]:
        """Return the boxes of the numbers of a weight."""
        found = []
        for key, tensor in self._filled.items():
            found += boxes_of(f"state.{name}.{key}", tensor)
        return found

    def put_back(self) -> None:
        """Give all parts what was filled."""
        for entry in self._entries:
            for key, tensor in self._filled.items():
                value = entry[key]
                if isinstance(value, torch.Tensor):
                    value.copy_(tensor)
                else:
                    entry[key] = type(value)(tensor.item())
