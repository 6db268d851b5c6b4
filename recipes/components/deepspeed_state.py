# SPDX-License-Identifier: Apache-2.0
"""Gather what DeepSpeed trains as whole tensors by name, and restore it into its engine.

components/state.py calls this. ZeRO-1 to 3 hold flat fp32 parts of the weights and of their
optimizer state. In bf16 and fp16, ZeRO-0 holds an fp32 master weight for each weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object

from components import upstream
from components.gathering import gather_parts
from components.owners import Entry
from components.saved_state import SavedState

# {name: (weight, its fp32 master weight)}
MasterWeights = dict[str, tuple[torch.Tensor, torch.Tensor]]

# What torch.compile, activation checkpointing and FSDP insert into the names of parameters
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def clean_name(name: str) -> str:
    """Return a parameter's name without what wrappers insert; DDP and DeepSpeed add module."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def flatten(name: str, value: Any) -> dict[str, torch.Tensor]:
    """Return {name.key.key: tensor} of nested optimizer state, each where the optimizer has it.

    bitsandbytes nests its state and counts steps in plain numbers.
    """
    if not isinstance(value, dict):
        return {name: torch.as_tensor(value)}
    leaves = {}
    for key, inner in value.items():
        leaves.update(flatten(f"{name}.{key}", inner))
    return leaves


# ---- ZeRO-0 in bf16 or fp16 ----
def master_weights(model: torch.nn.Module, optimizer: Any) -> MasterWeights:
    """Return ZeRO-0's weights and fp32 master weights in bf16 or fp16 by name, {} otherwise.

    Each rank holds all of them whole.

    Args:
        optimizer: DeepSpeed's, or any other, which then has no master weights.
    """
    low_groups = getattr(optimizer, "fp16_groups", [])
    master_groups = getattr(optimizer, "fp32_groups", [])
    names = {weight: clean_name(name) for name, weight in model.named_parameters()}
    found = {}
    for weights, masters in zip(low_groups, master_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            found[names[weight]] = (weight, master)
    return found


def master_parts(
    masters: MasterWeights, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for ZeRO-0's fp32 master weights and their optimizer state.

    The tensors stay on the GPU: each rank has all of them, and is to copy only its share to the
    host, one after another.

    Args:
        optimizer: the one that DeepSpeed wraps.
    """
    for name, (_, master) in masters.items():
        yield name, master.detach()
        yield from flatten(f"state.{name}", optimizer.state[master]).items()


def restore_master_state(
    masters: MasterWeights, optimizer: torch.optim.Optimizer, state: SavedState
) -> None:
    """Copy a saved state into ZeRO-0's master weights, 16-bit copies and optimizer state.

    Every rank takes part.
    """
    for name, (weight, master) in masters.items():
        master.data.copy_(state.fetch(name))
        weight.data.copy_(master.data)
        for key, tensor in optimizer.state[master].items():
            tensor.copy_(state.fetch(f"state.{name}.{key}"))


# ---- ZeRO-1 to 3 ----
def zero_weights(engine: Any) -> dict[str, Any]:
    """Return {name: weight} of what ZeRO-1 to 3 train, each linked to its optimizer state."""
    upstream.link_optimizer_states(engine.optimizer)
    weights = {}
    for name, weight in engine.named_parameters():
        if weight.requires_grad:
            weights[clean_name(name)] = weight
    return weights


def zero_entries(engine: Any) -> Iterator[Entry]:
    """Yield an entry for everything that ZeRO-1 to 3 train. All ranks have the same.

    Tensors are gathered from the flat parts of the fp32 weights and their state that the ranks hold
    (deepspeed/utils/tensor_fragment.py).
    """
    moments, numbers = state_of_parts(engine.optimizer.optimizer)
    weights = zero_weights(engine)
    parts = gather_object([{name: own_length(weight) for name, weight in weights.items()}])
    for name, weight in weights.items():
        # In fp32, whatever the dtype of the weight in the model; ZeRO-3 leaves that empty.
        nbytes = 4 * getattr(weight, "ds_numel", weight.numel())
        lengths = [of_rank[name] for of_rank in parts]
        yield Entry(name, nbytes, partial(gather_zero_tensor, weight, lengths, None))
        for key in moments:
            gather = partial(gather_zero_tensor, weight, lengths, key)
            yield Entry(f"state.{name}.{key}", nbytes, gather)
        for key, number in numbers.items():
            yield Entry(f"state.{name}.{key}", number.nbytes, lambda owner, it=number: it)


def state_of_parts(optimizer: torch.optim.Optimizer) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the keys of an optimizer's moments, and the numbers beside them, such as the step.

    AdamW has two moments of each part and its step, Lion only a moment.
    """
    keys: dict[str, None] = {}
    numbers: dict[str, torch.Tensor] = {}
    for part, entries in optimizer.state.items():
        for key, value in entries.items():
            keys[key] = None
            if getattr(value, "shape", None) != part.shape:
                numbers[key] = torch.tensor(float(value))
    return [key for key in keys if key not in numbers], numbers


def own_length(weight: Any) -> int:
    """Return how many elements of a weight are in this rank's flat part, without its padding."""
    if not hasattr(weight, "ds_tensor"):  # ZeRO-1 and 2
        return 0 if weight._hp_mapping is None else weight._hp_mapping.lp_fragment_address.numel
    size = weight.ds_tensor.numel()
    rest = weight.ds_numel - size * dist.get_rank(weight.ds_process_group)
    return min(max(rest, 0), size)


def gather_zero_tensor(
    weight: Any, lengths: Sequence[int], key: str | None, owner: int
) -> torch.Tensor:
    """Return the fp32 weight, or a moment of it, whole on its owner. Every rank takes part.

    Args:
        lengths: of the parts that the ranks of the run have.
        key: the name of the moment; None for the weight.
    """
    from deepspeed.utils import safe_get_local_fp32_param, safe_get_local_optimizer_state

    if hasattr(weight, "ds_tensor"):
        if key is None:
            part = safe_get_local_fp32_param(weight)
        else:
            part = safe_get_local_optimizer_state(weight, key)
        return join_zero_parts(part, lengths, weight.ds_process_group, weight.ds_shape, owner)
    part = torch.empty(0)
    if weight._hp_mapping is not None:
        part = weight._hp_mapping.get_hp_fragment(key)
    part = part.to(weight.device)  # The optimizer may be on the host.
    return join_zero_parts(part, lengths, weight._dp_group, weight.shape, owner)


def zero3_weight_entries(weights: Mapping[str, Any]) -> Iterator[Entry]:
    """Yield an entry for each of these weights of ZeRO-3, whether it is trained or frozen.

    Every rank takes part.

    Args:
        weights: by name, tied ones once.
    """
    parts = gather_object([{name: own_length(weight) for name, weight in weights.items()}])
    for name, weight in weights.items():
        lengths = [of_rank[name] for of_rank in parts]
        gather = partial(gather_zero3_weight, weight, lengths)
        yield Entry(name, weight.ds_numel * weight.element_size(), gather)


def gather_zero3_weight(weight: Any, lengths: Sequence[int], owner: int) -> torch.Tensor:
    """Return a weight of ZeRO-3's model whole on its owner, in the dtype in which it computes.

    Every rank takes part.

    Args:
        lengths: of the parts that the ranks of the run have.
    """
    part = weight.ds_tensor.to(weight.device)  # The weights may be on the host.
    return join_zero_parts(part, lengths, weight.ds_process_group, weight.ds_shape, owner)


def join_zero_parts(
    part: torch.Tensor, lengths: Sequence[int], group: Any, shape: torch.Size, owner: int
) -> torch.Tensor:
    """Return a flat tensor whole on its owner, from the parts of the ranks of a group.

    Args:
        part: this rank's, which may end with padding.
        lengths: of the parts that the ranks of the run have, without padding.
        shape: of the whole.
    """
    part = part[: lengths[dist.get_rank()]]
    of_group = [lengths[rank] for rank in dist.get_process_group_ranks(group)]
    whole = gather_parts(part, of_group, owner, group)
    return whole.view(shape) if dist.get_rank() == owner else whole


def restore_zero_state(engine: Any, state: SavedState) -> None:
    """Fill the flat parts of ZeRO-1 to 3, and the weights of the model, from a saved state.

    Every rank takes part.
    """
    zero = engine.optimizer
    make_zero_state(zero, state)
    moments, _ = state_of_parts(zero.optimizer)
    for name, weight in zero_weights(engine).items():
        for key in moments:
            restore_zero_tensor(zero, weight, state.fetch(f"state.{name}.{key}"), key)
        whole = state.fetch(name)
        restore_zero_tensor(zero, weight, whole, None)
        if hasattr(weight, "ds_tensor"):
            restore_zero3_weight(weight, whole)
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()


def make_zero_state(zero: Any, state: SavedState) -> None:
    """Give the flat parts the saved numbers, and moments of zeros that are filled later.

    Before the first step, they have no optimizer state of their own.

    Args:
        zero: DeepSpeed's optimizer.
    """
    moments: dict[str, str] = {}  # a name in the checkpoint by its key
    numbers: dict[str, str] = {}
    for name in state.names:
        if name.startswith("state."):
            kind = moments if state.has_dimensions(name) else numbers
            kind[name.rpartition(".")[2]] = name
    # A weight without dimensions has moments without them
    step = {key: state.fetch(name) for key, name in numbers.items() if key not in moments}
    parts = getattr(zero, "fp32_partitioned_groups_flat", None)  # ZeRO-3
    if not parts:
        parts = zero.single_partition_of_fp32_groups
    for flat in parts:
        entry = {key: number.to(flat.device, copy=True) for key, number in step.items()}
        for key in moments:
            entry[key] = torch.zeros_like(flat)
        zero.optimizer.state[flat] = entry


def restore_zero_tensor(zero: Any, weight: Any, whole: torch.Tensor, key: str | None) -> None:
    """Fill this rank's part of one fp32 weight, or of a moment of it.

    Args:
        zero: DeepSpeed's optimizer.
        whole: what was saved.
        key: the name of the moment; None, as for DeepSpeed, for the weight.
    """
    if not hasattr(weight, "ds_tensor"):  # ZeRO-1 and 2
        weight.set_full_hp_param(whole.to(weight.device), key)
        return
    size = weight.ds_tensor.numel()
    start = size * dist.get_rank(weight.ds_process_group)
    # Only the own part: DeepSpeed's function for whole tensors fails if the last part is padded
    part = whole.flatten()[start : start + size]
    part = torch.nn.functional.pad(part, (0, size - part.numel()))
    zero.set_local_hp_param(part, weight, key)


def restore_zero3_weight(weight: Any, whole: torch.Tensor) -> None:
    """Fill the weight in the model of ZeRO-3. Every rank takes part."""
    import deepspeed

    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.copy_(whole.view(weight.shape))
