# SPDX-License-Identifier: Apache-2.0
"""Training state as whole tensors by name, gathered from any strategy and restored under any.

Checkpoints hold these tensors, so that they fit every YAML and number of ranks.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor, distribute_tensor

from components.deepspeed_state import (
    clean_name,
    master_parts,
    master_weights,
    restore_master_state,
    restore_zero_state,
    zero_entries,
)
from components.fsdp1_state import NOTHING, fsdp1_entries, fsdp1_parts, is_fsdp1
from components.gathering import gather_shards
from components.owners import Entry, largest_first, share_out
from components.saved_state import SavedState
from components.strategy import Strategy

# A function that restores what one engine trains, from the model, the engine's optimizer, a saved
# state and the names of its tensors. Every rank calls it. It returns whether all is in place.
Restorer = Callable[[torch.nn.Module, Any, SavedState, Collection[str]], bool]
LARGEST_MAP = 4096  # elements; bitsandbytes' quantization maps have no more
# The attributes that are the state of DeepSpeed's dynamic loss scale
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


# ---- Gather ----
def gather_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    only_model: bool = False,
    copy: bool = False,
) -> dict[str, torch.Tensor]:
    """Gather each tensor of the training state on the host of its owner. Every rank takes part.

    The ranks' results are disjoint, and balanced by bytes. While one whole tensor is gathered after
    another, a rank needs memory for its result and for about two of the largest tensors.

    Args:
        only_model: leave out the state of the optimizer.
        copy: return tensors that no later step changes. Otherwise those of a state that is on the
            host already are that state.

    Returns:
        {NAME: trained weight, state.NAME.KEY: its optimizer state, buffer.NAME: running statistic},
        whole tensors on the host, as far as this rank owns them. KEY is the optimizer's own: step,
        exp_avg, exp_avg_sq for AdamW. Where the engine has fp32 master weights, these are the
        weights.
    """
    free_whole_weights(model)
    entries = []
    for entry in trained_parts(accelerator, model, optimizer.optimizer):
        if not (only_model and entry.name.startswith("state.")):
            entries.append(entry)
    owners = owners_of(accelerator, entries)
    rank = accelerator.process_index
    state = {}
    for entry in largest_first(entries):
        tensor = entry.gather(owners[entry.name])
        if owners[entry.name] == rank:
            state[entry.name] = storable(tensor, copy)
        del tensor  # Before the next one is gathered
    if accelerator.is_main_process:  # Each rank has statistics of its own rows.
        for name, buffer in running_statistics(model):
            state[name] = storable(buffer, copy)
    return state


def owners_of(accelerator: Accelerator, entries: Iterable[Entry]) -> dict[str, int]:
    """Return the rank that owns each tensor. Every rank takes part.

    Args:
        entries: of this rank. Only the ranks of a pipeline have different ones, and what a stage
            has goes to one of its ranks.
    """
    sizes = {entry.name: entry.nbytes for entry in entries}
    if Strategy.of(accelerator).pipeline == 1:
        return share_out(sizes, accelerator.num_processes)
    holders: dict[str, list[int]] = {}
    for rank, found in enumerate(gather_object([sizes])):
        sizes |= found
        for name in found:
            holders.setdefault(name, []).append(rank)
    return share_out(sizes, accelerator.num_processes, holders)


def trained_parts(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any
) -> Iterable[Entry]:
    """Return entries for what the optimizer trains, and its state, as the engine needs it."""
    if has_flat_parts(Strategy.of(accelerator)):
        return zero_entries(model)
    masters = master_weights(model, optimizer)
    if masters:
        return entries_of(master_parts(masters, optimizer.optimizer))
    _init_optim_state(optimizer)  # There may have been no step yet.
    if is_fsdp1(model):
        return fsdp1_entries(model, optimizer, trained_weights(model, optimizer))
    return entries_of(trained_entries(model, optimizer))


def has_flat_parts(strategy: Strategy) -> bool:
    """Return whether the engine is ZeRO-1, 2 or 3, which train flat parts of the weights."""
    return strategy.zero_stage is not None and strategy.zero_stage > 0


def entries_of(parts: Iterable[tuple[str, Any]]) -> Iterator[Entry]:
    """Yield entries for pairs of name and number, tensor or DTensor.

    torch's get_state_dict does not work here: it looks up each name of the model's state_dict, and
    the scales of bitsandbytes' int8 layers (SCB) are not attributes of their modules. It also
    gathers everything on rank 0.
    """
    for name, value in parts:
        tensor = torch.as_tensor(value)
        yield Entry(name, tensor.nbytes, partial(gather_tensor, tensor))


def gather_tensor(tensor: torch.Tensor, owner: int) -> torch.Tensor:
    """Return a tensor whole on its owner. Every rank that has a shard of it takes part."""
    if isinstance(tensor, DTensor):
        return gather_shards(tensor, owner)
    return tensor.detach()


def storable(tensor: torch.Tensor, copy: bool) -> torch.Tensor:
    """Return a tensor as safetensors needs it: on the host, contiguous, with memory of its own.

    bitsandbytes shares its small quantization maps between weights, so small tensors are copied.

    Args:
        copy: whether to copy a tensor also if it is on the host.
    """
    if tensor.device.type != "cpu":
        tensor = tensor.cpu()
        copy = False
    if copy or tensor.numel() <= LARGEST_MAP:
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


# ---- Restore ----
def restore_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    state: SavedState,
) -> bool:
    """Restore a saved state, on each rank its part, and compare the result with it.

    Every rank takes part.

    Where the engine allows it, tensors are copied in place, one at a time: nothing is held twice,
    and bitsandbytes' paged optimizer state stays in its memory.

    Returns:
        Whether all of the state is in place: on each rank for its own part, or for what it read.
    """
    buffers = dict(running_statistics(model))
    if not buffers.keys() <= set(state.names):
        return False
    for name, buffer in buffers.items():
        buffer.copy_(state.fetch(name))
    trained = [name for name in state.names if name not in buffers]

    restore = restorer_of(accelerator, model, optimizer.optimizer)
    return restore(model, optimizer.optimizer, state, trained)


def restorer_of(accelerator: Accelerator, model: torch.nn.Module, optimizer: Any) -> Restorer:
    """Return the function that restores what the engine in force trains."""
    strategy = Strategy.of(accelerator)
    if has_flat_parts(strategy):
        return restore_flat_parts
    if master_weights(model, optimizer):
        return restore_masters
    if strategy.pipeline > 1:
        return restore_stages
    return restore_in_place


def restore_flat_parts(
    model: torch.nn.Module, optimizer: Any, state: SavedState, names: Collection[str]
) -> bool:
    """Restore ZeRO-1, 2 or 3, and compare what it has then."""
    restore_zero_state(model, state)
    return are_restored(read_again(zero_entries(model), state), state, names)


def restore_masters(
    model: torch.nn.Module, optimizer: Any, state: SavedState, names: Collection[str]
) -> bool:
    """Restore ZeRO-0 in 16 bits, which trains fp32 master weights, and compare them."""
    masters = master_weights(model, optimizer)
    restore_master_state(masters, optimizer.optimizer, state)
    return are_restored(master_parts(masters, optimizer.optimizer), state, names)


def restore_stages(
    model: torch.nn.Module, optimizer: Any, state: SavedState, names: Collection[str]
) -> bool:
    """Restore a pipeline in place, of which each rank has the tensors of its stages."""
    _init_optim_state(optimizer)
    own = [name for name, _ in trained_entries(model, optimizer)]
    if set(gather_object(own)) != set(names):
        return False
    return copy_in_place(model, optimizer, state, names, own)


def restore_in_place(
    model: torch.nn.Module, optimizer: Any, state: SavedState, names: Collection[str]
) -> bool:
    """Restore one process, DDP, FSDP or ZeRO-0 in fp32 in place."""
    return copy_in_place(model, optimizer, state, names, own=names)


def restore_after_training(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    state: SavedState,
) -> bool:
    """Restore a saved state over the one that training has reached, as `restore_state` does.

    Call it between steps. Optimizer state is made from scratch where copy_in_place does so:
    FSDP1 keeps it only for weights of which the rank has a part, and the checkpoint has it for all.
    """
    if has_flat_parts(Strategy.of(accelerator)):
        return restore_state(accelerator, model, optimizer, state)
    if not master_weights(model, optimizer.optimizer):
        free_whole_weights(model)
        optimizer.optimizer.zero_grad(set_to_none=True)
        optimizer.optimizer.state.clear()
    return restore_state(accelerator, model, optimizer, state)


def free_whole_weights(model: torch.nn.Module) -> None:
    """Have FSDP drop the whole weights that an evaluation leaves behind.

    A forward pass without a backward pass keeps those of the root, or of all layers under
    SHARD_GRAD_OP. FSDP2 would have no sharded weights to restore, and FSDP1 would save the old
    whole ones. Before the first forward pass, as in a run resumed after its last step, FSDP1 has
    none, and cannot be told to drop them.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = module._handle
        if handle is None or not hasattr(handle.flat_param, "_local_shard"):
            continue
        if handle.uses_sharded_strategy:
            _reshard(module, handle, free_unsharded_flat_param=True)


def read_again(entries: Iterable[Entry], state: SavedState) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of entries, whole on the rank that has read it from the checkpoint.

    Every rank must iterate over all.
    """
    for entry in entries:
        yield entry.name, entry.gather(state.reader_of(entry.name))


def are_restored(
    parts: Iterable[tuple[str, torch.Tensor]], state: SavedState, names: Collection[str]
) -> bool:
    """Return whether pairs of name and tensor have these names, and the values that were saved.

    Each rank compares what it reads from the checkpoint.
    """
    found = set()
    is_equal = True
    for name, tensor in parts:  # Up to the last one, since gathering it may need every rank.
        found.add(name)
        if name in state.own:
            is_equal = is_equal and torch.equal(tensor.cpu(), state.own[name])
    return is_equal and found == set(names)


def copy_in_place(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    state: SavedState,
    names: Collection[str],
    own: Collection[str],
) -> bool:
    """Copy a saved state into the weights and the optimizer, tensor by tensor.

    Every rank takes part.

    Args:
        names: of what to restore, in the same order on every rank.
        own: those of which this rank has all or a part; a rank of a pipeline has those of its
            stages.

    Returns:
        Whether `own` and the optimizer name the same tensors, and each now has the saved values.
    """
    _init_optim_state(optimizer)  # It takes a step of rate 0, after which all state exists.
    if any(name.startswith("state.") for name in names):
        forget_unsaved_state(model, optimizer, names)
    parts = fsdp1_parts(model)
    places = places_of(model, optimizer, parts)
    if places.keys() != set(own):
        return False

    arrived = []
    with torch.no_grad():
        for name in names:
            whole = state.fetch(name)
            if name in places:
                arrived.append(places[name].fill(whole))
    for weight, part in parts.items():
        if part == NOTHING:  # FSDP1 expects state only for weights of which the rank has a part.
            optimizer.state.pop(weight, None)
    return all(arrived)


def forget_unsaved_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, saved: Collection[str]
) -> None:
    """Drop the optimizer's state of weights that had none: no gradient had reached them."""
    for name, weight in trained_weights(model, optimizer).items():
        entries = {f"state.{name}.{saved_key(optimizer, key)}" for key in optimizer.state[weight]}
        if entries.isdisjoint(saved):
            optimizer.state.pop(weight)


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint belongs on this rank.

    Attributes:
        holder: the mapping that has the value under `key`: a tensor, or bitsandbytes' number.
        part: the slice of the flattened whole that this rank has under FSDP1; None for all of it.
    """

    holder: Any
    key: Any
    part: slice | None

    def fill(self, whole: torch.Tensor) -> bool:
        """Put what was saved in place. Returns whether it arrived."""
        value = self.holder[self.key]
        if isinstance(value, torch.Tensor):
            return copy_whole(whole, value, self.part)
        self.holder[self.key] = type(value)(whole.item())  # bitsandbytes counts steps in an int.
        return True


def places_of(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    parts: Mapping[torch.Tensor, slice],
) -> dict[str, Place]:
    """Return {name in a checkpoint: its place} of the weights and the optimizer state.

    Args:
        parts: the result of `fsdp1_parts`.
    """
    places = {}
    weights = trained_weights(model, optimizer)
    for name, weight in weights.items():
        part = parts.get(weight)
        places[name] = Place(weights, name, part)
        entries = optimizer.state[weight]
        for key in entries:
            place = f"state.{name}.{saved_key(optimizer, key)}"
            places[place] = Place(entries, key, part)
    return places


def copy_whole(saved: torch.Tensor, target: torch.Tensor, part: slice | None = None) -> bool:
    """Copy a whole tensor into a tensor, or into this rank's part of it.

    Args:
        part: the target's slice in `fsdp1_parts`; a DTensor knows its own part.

    Returns:
        Whether it arrived.
    """
    if isinstance(target, DTensor):
        # With src_data_rank=None each rank cuts its own part, without communication.
        saved = distribute_tensor(
            saved, target.device_mesh, target.placements, src_data_rank=None
        ).to_local()
        target = target.to_local()
    elif part is not None and saved.dim() > 0:  # The count of steps is whole on every rank.
        saved = saved.flatten()[part]
        target = target.view(-1)
    target.copy_(saved)
    return torch.equal(target, saved.to(target.device, target.dtype))


# ---- Names and tensors ----
def trained_weights(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return {name: weight} of what the optimizer trains, in its order, without wrappers' names."""
    names = {weight: clean_name(name) for name, weight in model.named_parameters()}
    weights = {}
    for group in optimizer.param_groups:
        for weight in group["params"]:
            weights[names[weight]] = weight
    return weights


def trained_entries(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, Any]]:
    """Yield the names of checkpoints, and this rank's weights and optimizer state for them."""
    for name, weight in trained_weights(model, optimizer).items():
        yield name, weight
        for key, value in optimizer.state[weight].items():
            yield f"state.{name}.{saved_key(optimizer, key)}", value


def saved_key(optimizer: Any, key: str) -> str:
    """Return the name of an entry of optimizer state in a checkpoint.

    bitsandbytes nests its own entries in state_dict(), so that FSDP does not take them for tensors
    of the weight's shape (bitsandbytes/optim/optimizer.py).
    """
    if key in getattr(optimizer, "non_castable_tensor_keys", ()):
        return f"{optimizer._FSDP_WRAPPED_QUANT_STATE_KEY}.{key}"
    return key


def running_statistics(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (buffer.NAME, buffer) of what training changes besides the weights.

    These are the means and variances of BatchNorm.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield f"buffer.{clean_name(name)}", buffer


def first_nonfinite(state: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with a number in it that is not finite, or None.

    The sum of a tensor is not finite if one of its numbers is not, and is thirty times as fast as
    checking each number (18 against 0.57 GB/s on one thread). Finite numbers can have a sum that is
    not finite: only then are they checked one by one.
    """
    for name, tensor in state.items():
        if not tensor.is_floating_point() or tensor.sum().isfinite():
            continue
        if not tensor.isfinite().all():
            return name
    return None


# ---- Loss scale of fp16 ----
def get_loss_scale(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
    """Return the state of fp16's loss scale, {} without fp16.

    It is in accelerate's scaler, or in DeepSpeed's, which has no function for it.
    """
    if accelerator.mixed_precision != "fp16":
        return {}
    if accelerator.scaler:
        return accelerator.scaler.state_dict()
    scaler = deepspeed_scaler(optimizer)
    return {name: scaler[name] for name in LOSS_SCALE if name in scaler}


def restore_loss_scale(
    accelerator: Accelerator, optimizer: AcceleratedOptimizer, saved: Mapping[str, Any]
) -> None:
    """Restore fp16's loss scale, as far as the scaler in force now has the saved values.

    Args:
        saved: what `get_loss_scale` returned under any strategy.
    """
    if accelerator.mixed_precision != "fp16":
        return
    if accelerator.scaler:
        if "scale" in saved:
            accelerator.scaler.load_state_dict(dict(saved))
        return
    scaler = deepspeed_scaler(optimizer)
    for name, value in saved.items():
        if name in scaler:
            scaler[name] = value


def deepspeed_scaler(optimizer: AcceleratedOptimizer) -> dict[str, Any]:
    """Return the attributes of DeepSpeed's loss scaler, which can be changed in this dict."""
    zero = optimizer.optimizer
    scaler = getattr(zero, "loss_scaler", None)
    if scaler is None:
        scaler = zero.loss_scale_config  # ZeRO-0 calls it so.
    return vars(scaler)
