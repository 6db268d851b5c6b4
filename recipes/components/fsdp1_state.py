# SPDX-License-Identifier: Apache-2.0
"""What FSDP1 trains as whole tensors by name, joined from the parts of flat weights.

components/state.py calls this. FSDP1 cuts the weights of a layer, laid end to end, into equal
parts, so that a rank has the end of one and the beginning of another, all of some, and nothing of
others (torch/distributed/fsdp/_flat_param.py, _ShardParamInfo).
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from components.deepspeed_state import MOMENTS
from components.owners import Entry

NOTHING = slice(0, 0)


def is_fsdp1(model: torch.nn.Module) -> bool:
    """Return whether FSDP1 wraps the model: its weights are then views of flat parts."""
    return isinstance(model, FullyShardedDataParallel)


def fsdp1_parts(model: torch.nn.Module) -> dict[torch.Tensor, slice]:
    """Return {weight: the slice of its flattened whole that this rank has} under FSDP1, else {}.

    Without these slices each rank would need the whole weights.
    """
    parts: dict[torch.Tensor, slice] = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module._handle is None:
            continue
        flat: Any = module._handle.flat_param
        for weight, info in zip(flat._params, flat._shard_param_infos, strict=True):
            parts[weight] = NOTHING
            if info.in_shard:
                parts[weight] = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
    return parts


def flat_weights(model: torch.nn.Module) -> Iterator[tuple[torch.Tensor, Any, torch.Size]]:
    """Yield (weight, FSDP1's handle of the flat weight that has it, whole shape) of each weight."""
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = module._handle
        if handle is None:
            continue
        flat = handle.flat_param
        for weight, shape in zip(flat._params, flat._shapes, strict=True):
            yield weight, handle, shape


def fsdp1_entries(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]
) -> Iterator[Entry]:
    """Yield an entry for each weight that FSDP1 trains, and for AdamW's state of it.

    The entries are the same on every rank, whatever part it has.

    Args:
        weights: what is trained, by name.
    """
    names = {weight: name for name, weight in weights.items()}
    parts = fsdp1_parts(model)
    for weight, handle, shape in flat_weights(model):
        if weight not in names:  # Frozen
            continue
        state = optimizer.state.get(weight, {})
        name = names[weight]
        whole = partial(join_parts, handle, parts[weight], shape)
        nbytes = shape.numel() * weight.element_size()
        yield Entry(name, nbytes, partial(whole, weight))
        for key in MOMENTS:
            # A rank without a part of the weight may have no moments of it.
            moment = state.get(key, torch.zeros_like(weight))
            yield Entry(f"state.{name}.{key}", nbytes, partial(whole, moment))
        step = state.get("step", torch.zeros(()))
        yield Entry(f"state.{name}.step", step.nbytes, partial(largest, handle, step))


def fsdp1_weight_entries(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> Iterator[Entry]:
    """Yield an entry for each of FSDP1's weights, whether it is trained or frozen.

    Args:
        weights: by name, tied ones once.
    """
    names = {weight: name for name, weight in weights.items()}
    parts = fsdp1_parts(model)
    for weight, handle, shape in flat_weights(model):
        gather = partial(join_parts, handle, parts[weight], shape, weight)
        yield Entry(names[weight], shape.numel() * weight.element_size(), gather)


def join_parts(
    handle: Any, part: slice, shape: torch.Size, mine: torch.Tensor, owner: int
) -> torch.Tensor:
    """Return a whole tensor on its owner. The ranks that shard the weight take part.

    Args:
        handle: FSDP1's, of the flat weight.
        part: the slice of the flattened whole that this rank has, and `mine` what it has there.
        owner: the rank that is to have the tensor. Ranks that shard another copy return zeros.
    """
    whole = torch.zeros(shape.numel(), dtype=mine.dtype, device=handle.device)
    length = part.stop - part.start
    whole[part].copy_(mine.detach().flatten()[:length])
    # All ranks take part or none: also one that happens to have all of this weight.
    if handle.uses_sharded_strategy and owner in dist.get_process_group_ranks(handle.process_group):
        # Sums of bytes with zeros, since -0.0 + 0.0 would lose its sign.
        dist.reduce(whole.view(torch.uint8), dst=owner, group=handle.process_group)
    return whole.view(shape)


def largest(handle: Any, step: torch.Tensor, owner: int) -> torch.Tensor:
    """Return the largest count of steps of the ranks that shard a weight: some have none of it."""
    counted = step.to(handle.device, copy=True)
    if owner in dist.get_process_group_ranks(handle.process_group):
        dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=handle.process_group)
    return counted
