# SPDX-License-Identifier: Apache-2.0
"""What FSDP1 trains as whole tensors by name, joined from the parts of flat weights.

components/state.py calls this. FSDP1 cuts the weights of a layer, laid end to end, into equal
parts, so that a rank has the end of one and the beginning of another, all of some, and nothing of
others (torch/distributed/fsdp/_flat_param.py, _ShardParamInfo).
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import gather_object
from torch.distributed.fsdp import FullyShardedDataParallel

from components.deepspeed_state import state_of_parts
from components.gathering import gather_parts
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
    """Yield an entry for each weight that FSDP1 trains, and for the optimizer's state of it.

    Every rank takes part. The entries are the same on each, whatever part it has.

    Args:
        weights: what is trained, by name.
    """
    names = {weight: name for name, weight in weights.items()}
    lengths = lengths_of_parts(model)
    of_ranks = gather_object([state_of_parts(optimizer)])
    moments = dict.fromkeys(key for found, _ in of_ranks for key in found)
    numbers = dict.fromkeys(key for _, found in of_ranks for key in found)
    for weight, handle, shape in flat_weights(model):
        if weight not in names:  # Frozen
            continue
        state = optimizer.state.get(weight, {})
        name = names[weight]
        whole = partial(join_parts, handle, lengths[weight], shape)
        nbytes = shape.numel() * weight.element_size()
        yield Entry(name, nbytes, partial(whole, weight))
        for key in moments:
            # A rank without a part of the weight may have no moments of it.
            moment = state.get(key, torch.zeros_like(weight))
            yield Entry(f"state.{name}.{key}", nbytes, partial(whole, moment))
        for key in numbers:
            number = torch.as_tensor(state.get(key, torch.zeros(())))
            yield Entry(f"state.{name}.{key}", number.nbytes, partial(largest, handle, number))


def fsdp1_weight_entries(
    model: torch.nn.Module, weights: Mapping[str, torch.Tensor]
) -> Iterator[Entry]:
    """Yield an entry for each of these weights of FSDP1, whether it is trained or frozen.

    Every rank takes part.

    Args:
        weights: by name, tied ones once.
    """
    names = {weight: name for name, weight in weights.items()}
    lengths = lengths_of_parts(model)
    for weight, handle, shape in flat_weights(model):
        if weight in names:
            gather = partial(join_parts, handle, lengths[weight], shape, weight)
            yield Entry(names[weight], shape.numel() * weight.element_size(), gather)


def lengths_of_parts(model: torch.nn.Module) -> dict[torch.Tensor, list[int]]:
    """Return how much of each weight each rank of the run has. Every rank takes part."""
    parts = fsdp1_parts(model)
    own = [part.stop - part.start for part in parts.values()]
    of_weights = zip(*gather_object([own]), strict=True)
    return {weight: list(found) for weight, found in zip(parts, of_weights, strict=True)}


def join_parts(
    handle: Any, lengths: Sequence[int], shape: torch.Size, mine: torch.Tensor, owner: int
) -> torch.Tensor:
    """Return a whole tensor on its owner. The ranks that shard the weight take part.

    Args:
        handle: FSDP1's, of the flat weight.
        lengths: of the parts that the ranks of the run have, and `mine` what this one has.
        owner: the rank that is to have the tensor.
    """
    part = mine.detach().to(handle.device).flatten()
    if not handle.uses_sharded_strategy:
        return part.clone().view(shape)
    ranks = dist.get_process_group_ranks(handle.process_group)
    part = part[: lengths[dist.get_rank()]]
    whole = gather_parts(part, [lengths[rank] for rank in ranks], owner, handle.process_group)
    return whole.view(shape) if dist.get_rank() == owner else whole


def largest(handle: Any, step: torch.Tensor, owner: int) -> torch.Tensor:
    """Return the largest count of steps of the ranks that shard a weight: some have none of it."""
    counted = step.to(handle.device, copy=True)
    if owner in dist.get_process_group_ranks(handle.process_group):
        dist.all_reduce(counted, op=dist.ReduceOp.MAX, group=handle.process_group)
    return counted
