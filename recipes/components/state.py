# SPDX-License-Identifier: Apache-2.0
"""Training state as whole tensors by name, gathered from any strategy and restored under any.

Checkpoints hold these tensors, so that they fit every YAML and number of ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_state_dict,
)
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor, distribute_tensor

from components.deepspeed_state import (
    MasterWeights,
    Tensors,
    clean_name,
    flatten,
    master_parts,
    master_weights,
    restore_master_state,
    restore_zero_state,
    zero_parts,
)
from components.pipeline_state import parts_of_stages
from components.strategy import Strategy

WHOLE = StateDictOptions(
    full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False
)
NOTHING = slice(0, 0)
LARGEST_MAP = 4096  # elements; bitsandbytes' quantization maps have no more
# The attributes that are the state of DeepSpeed's dynamic loss scale
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


# ---- Gather ----
def gather_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer
) -> dict[str, torch.Tensor]:
    """Gather the whole training state on the host of rank 0. Every rank must take part.

    Rank 0 needs 12 bytes of memory for each trained parameter.

    Returns:
        On rank 0 {NAME: trained weight, state.NAME.KEY: its optimizer state, buffer.NAME: running
        statistic}, whole tensors on the host; {} on the other ranks. KEY is the optimizer's own:
        step, exp_avg, exp_avg_sq for AdamW. Where the engine has fp32 master weights, these are
        the weights.
    """
    state = gather_trained(accelerator, model, optimizer.optimizer)
    for name, buffer in running_statistics(model):
        state[name] = buffer.cpu()
    kept = state if accelerator.is_main_process else {}
    return {name: storable(tensor) for name, tensor in kept.items()}


def without_optimizer_state(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what `gather_state` returned except the state of the optimizer."""
    return {name: tensor for name, tensor in state.items() if not name.startswith("state.")}


def gather_trained(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: Any
) -> dict[str, torch.Tensor]:
    """Return what the optimizer trains, and its state, by the way that the engine needs."""
    strategy = Strategy.of(accelerator)
    if has_flat_parts(strategy):
        return gather_zero_state(accelerator, model)
    if strategy.pipeline > 1:
        _init_optim_state(optimizer)
        return dict(parts_of_stages(accelerator, trained_entries(model, optimizer)))
    masters = master_weights(model, optimizer)
    if masters:
        return gather_master_state(accelerator, masters, optimizer.optimizer)
    if strategy.fsdp_version > 0 or strategy.is_split:
        return gather_fsdp_state(model, optimizer)
    return gather_unsharded_state(accelerator, model, optimizer)


def has_flat_parts(strategy: Strategy) -> bool:
    """Return whether the engine is ZeRO-1, 2 or 3, which train flat parts of the weights."""
    return strategy.zero_stage is not None and strategy.zero_stage > 0


def gather_zero_state(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: whole tensor on the host} of ZeRO-1 to 3 on rank 0, {} elsewhere."""
    state = {}
    for name, tensor in zero_parts(model):  # Every rank must iterate over all of them.
        if accelerator.is_main_process:
            state[name] = tensor.to("cpu", copy=True)
    return state


def gather_master_state(
    accelerator: Accelerator, masters: MasterWeights, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the state of ZeRO-0 in bf16 or fp16 on rank 0, {} on the others, which have the same.

    Args:
        masters: the result of `master_weights`.
        optimizer: the one that DeepSpeed wraps.
    """
    kept = masters if accelerator.is_main_process else {}
    return {name: tensor.cpu() for name, tensor in master_parts(kept, optimizer)}


def gather_unsharded_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the state of one process, DDP or ZeRO-0 in fp32 on rank 0, {} on the others.

    torch's get_state_dict does not work here: it looks up each name of the model's state_dict, and
    the scales of bitsandbytes' int8 layers (SCB) are not attributes of their modules.
    """
    state: dict[str, torch.Tensor] = {}
    if accelerator.is_main_process:
        add_unsharded_state(state, model, optimizer)
    return state


def add_unsharded_state(
    state: dict[str, torch.Tensor], model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Add the weights that this process trains, and their optimizer state, on the host."""
    _init_optim_state(optimizer)  # As get_state_dict does: there may have been no step yet.
    for name, value in trained_entries(model, optimizer):
        state[name] = torch.as_tensor(value).detach().cpu()


def gather_fsdp_state(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.Tensor]:
    """Return the state of FSDP, from torch's get_state_dict, on rank 0, {} on the others."""
    # Under FSDP1 frozen weights are requested too: to leave them out, torch 2.13 deletes them on
    # every rank, also on those that have none, which raises a KeyError.
    options = replace(WHOLE, ignore_frozen_params=not is_fsdp1(model))
    weights, optimizer_state = get_state_dict(model, optimizer, options=options)
    entries: Any = optimizer_state.get("state", {})
    state: dict[str, Any] = {name: weights[name] for name in entries}
    state.update(flatten("state", entries))
    return state


def is_fsdp1(model: torch.nn.Module) -> bool:
    """Return whether FSDP1 wraps the model: its weights are then views of flat parts."""
    return type(model).__name__ == "FullyShardedDataParallel"


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as safetensors needs it: contiguous, with memory of its own.

    bitsandbytes shares its small quantization maps between weights, so small tensors are copied.
    """
    if tensor.numel() <= LARGEST_MAP:
        return tensor.clone()
    return tensor.contiguous()


# ---- Restore ----
def restore_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    state: Tensors,
) -> bool:
    """Restore a gathered state, on each rank its part, and compare the result with it.

    Where the engine allows it, tensors are copied in place, one at a time: nothing is held twice,
    and bitsandbytes' paged optimizer state stays in its memory.

    Args:
        state: {name: tensor on the host} on every rank, mapped from the checkpoint's file, so that
            the ranks of a host share its memory.

    Returns:
        Whether all of the state is in place: on rank 0 for every rank's part, or on each rank for
        its own.
    """
    buffers = dict(running_statistics(model))
    if not buffers.keys() <= state.keys():
        return False
    for name, buffer in buffers.items():
        buffer.copy_(state[name])
    trained = {name: tensor for name, tensor in state.items() if name not in buffers}

    if has_flat_parts(Strategy.of(accelerator)):
        restore_zero_state(model, trained)
        return are_restored(zero_parts(model), trained)
    if Strategy.of(accelerator).pipeline > 1:
        _init_optim_state(optimizer.optimizer)
        own = [name for name, _ in trained_entries(model, optimizer.optimizer)]
        if set(gather_object(own)) != trained.keys():
            return False
        trained = {name: trained[name] for name in own}
    masters = master_weights(model, optimizer.optimizer)
    if masters:
        inner = optimizer.optimizer.optimizer
        restore_master_state(masters, inner, trained)
        return are_restored(master_parts(masters, inner), trained)
    return restore_in_place(model, optimizer.optimizer, trained)


def restore_after_training(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    state: Tensors,
) -> bool:
    """Restore a gathered state over the one that training has reached, as `restore_state` does.

    Call it between steps. Optimizer state is made from scratch where restore_in_place does so:
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
    whole ones.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    for module in FullyShardedDataParallel.fsdp_modules(model):
        handle: Any = module._handle
        if handle is not None and handle.uses_sharded_strategy:
            _reshard(module, handle, free_unsharded_flat_param=True)


def are_restored(parts: Iterable[tuple[str, torch.Tensor]], state: Tensors) -> bool:
    """Return whether pairs of name and tensor have every name and value of `state`."""
    equal = {}
    for name, tensor in parts:  # Up to the last one, since zero_parts needs every rank for each.
        if name in state:
            equal[name] = torch.equal(tensor.cpu(), state[name])
    return equal.keys() == state.keys() and all(equal.values())


def restore_in_place(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Tensors
) -> bool:
    """Copy a gathered state into the weights and the optimizer, tensor by tensor.

    This is for one process, DDP, FSDP and ZeRO-0 in fp32. Returns whether state and optimizer name
    the same tensors, and each now has the saved values.
    """
    _init_optim_state(optimizer)  # It takes a step of rate 0, after which all state exists.
    parts = fsdp1_parts(model)
    places = {}  # {name: (tensor or number, this rank's part of the whole or None)}
    for name, weight in trained_weights(model, optimizer).items():
        part = parts.get(weight)
        places[name] = (weight, part)
        entries = optimizer.state[weight]
        for key, value in entries.items():
            place = f"state.{name}.{saved_key(optimizer, key)}"
            places[place] = (value, part)
            is_number = not isinstance(value, torch.Tensor)  # bitsandbytes counts steps in an int.
            if is_number and place in state:
                entries[key] = type(value)(state[place].item())
    if places.keys() != state.keys():
        return False

    arrived = []
    with torch.no_grad():
        for name, (target, part) in places.items():
            if isinstance(target, torch.Tensor):
                arrived.append(copy_whole(state[name], target, part))
    for weight, part in parts.items():
        if part == NOTHING:  # FSDP1 expects state only for weights of which the rank has a part.
            optimizer.state.pop(weight, None)
    return all(arrived)


def fsdp1_parts(model: torch.nn.Module) -> dict[torch.Tensor, slice]:
    """Return {weight: the slice of its flattened whole that this rank has} under FSDP1, else {}.

    FSDP1 cuts the weights of a layer, laid end to end, into equal parts, so that a rank has the end
    of one and the beginning of another, all of some, and nothing of others (torch/distributed/fsdp/
    _flat_param.py, _ShardParamInfo). Without these slices each rank would need the whole weights.
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


def copy_whole(saved: torch.Tensor, target: torch.Tensor, part: slice | None = None) -> bool:
    """Copy a whole tensor on the host into a tensor, or into this rank's part of it.

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


def first_nonfinite(state: Tensors) -> str | None:
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
