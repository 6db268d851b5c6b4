# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed trains, as boxes: core/state.py imports this where DeepSpeed is in force.

ZeRO-1 to 3 hold flat fp32 parts of the weights and of the optimizer's moments of them. In bf16 and
fp16, ZeRO-0 has an fp32 master weight for each weight. The names are those of other strategies.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from core import workarounds
from core.boxes import FlatSlice, LocalBox, Numbers, State, boxes_of, clean_name

Shapes = Mapping[str, Sequence[int]]


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


# ---- ZeRO-1 to 3 ----
def state_of_parts(engine: Any, zero: Any, saved: Shapes | None) -> State:
    """Return the slices of weights and moments that this rank has under ZeRO-1, 2 or 3.

    Args:
        zero: DeepSpeed's optimizer.
        saved: as `state_of` takes it.
    """
    is_third = hasattr(zero, "fp32_partitioned_groups_flat")
    flats = zero.fp32_partitioned_groups_flat if is_third else zero.single_partition_of_fp32_groups
    states = zero.optimizer.state
    if saved is not None:
        for flat in flats:
            states[flat] = new_entries(flat, saved)
    if not is_third:
        workarounds.link_optimizer_states(zero)
    # All parts have the same keys, and the same numbers, as all are stepped together
    entries = states[flats[0]]
    shape = flats[0].shape
    moments = [key for key, value in entries.items() if getattr(value, "shape", None) == shape]
    numbers = Numbers()
    others = [key for key in entries if key not in moments]
    counters = {key: numbers.as_tensor(entries, key, shape) for key in others}
    boxes: list[LocalBox] = []
    trained = [(name, one) for name, one in engine.named_parameters() if one.requires_grad]
    for full_name, weight in trained:
        name = clean_name(full_name)
        for key, number in counters.items():
            boxes += boxes_of(f"state.{name}.{key}", number)
        part = slice_of_third(weight) if is_third else slice_of_second(weight)
        boxes += boxes_of_part(zero, name, weight, part, moments)

    def after_fill() -> None:
        numbers.put_back()
        for flat in flats[1:]:
            for key in counters:
                states[flat][key] = copy.deepcopy(entries[key])
        if is_third:
            update_third(zero)
        else:
            zero.update_lp_params()

    return State(boxes, after_fill)


def boxes_of_part(
    zero: Any, name: str, weight: Any, part: FlatSlice, moments: Sequence[str]
) -> Iterator[LocalBox]:
    """Yield the boxes of a slice of a weight in fp32, and of its moments."""
    if part.length == 0:
        return
    for key in (None, *moments):
        whole_name = name if key is None else f"state.{name}.{key}"
        if hasattr(weight, "ds_id"):
            held, _ = zero._get_fp32_opt_state_partition(weight, False, key)
        else:
            held = weight._hp_mapping.get_hp_fragment(key)
        yield from boxes_of(whole_name, held[: part.length], part)


def slice_of_second(weight: Any) -> FlatSlice:
    """Return the slice of a weight of ZeRO-1 or 2 that this rank has."""
    if weight._hp_mapping is None:
        return FlatSlice(tuple(weight.shape), 0, 0)
    address = weight._hp_mapping.lp_fragment_address
    return FlatSlice(tuple(weight.shape), address.start, address.numel)


def slice_of_third(weight: Any) -> FlatSlice:
    """Return the slice of a weight of ZeRO-3 that this rank has, without the padding at its end."""
    size = weight.ds_tensor.numel()
    start = size * dist.get_rank(weight.ds_process_group)
    length = min(max(weight.ds_numel - start, 0), size)
    return FlatSlice(tuple(weight.ds_shape), start, length)


def update_third(zero: Any) -> None:
    """Copy the fp32 parts of ZeRO-3 into the weights of the model."""
    for number in range(len(zero.fp32_partitioned_groups_flat)):
        zero._reassign_or_swap_out_partitioned_parameters(number)
    small = zero.persistent_parameters  # Every rank keeps these whole
    if small:
        small[0].partition(small)
        small[0].all_gather(small)


def new_entries(flat: torch.Tensor, saved: Shapes) -> dict[str, torch.Tensor]:
    """Return moments of zeros and numbers of 0 for a flat part, under the keys that were saved.

    Before the first step it has none.
    """
    moments = set()
    numbers = set()
    for name, shape in saved.items():
        if name.startswith("state."):
            found = moments if len(shape) > 0 else numbers
            found.add(name.rpartition(".")[2])
    entries = {key: torch.zeros_like(flat) for key in sorted(moments)}
    for key in sorted(numbers - moments):  # A weight without dimensions has such moments
        entries[key] = torch.zeros((), device=flat.device)
    return entries
