# SPDX-License-Identifier: Apache-2.0
"""What training changes, as boxes of whole tensors: the same names under every strategy.

An engine only says which box of which whole tensor each of its tensors is. Saving writes the boxes
of this rank, resuming fills them in place, and nothing is ever gathered.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard
from torch.distributed.tensor import DTensor

from core.boxes import FlatSlice, LocalBox, Numbers, State, boxes_of, clean_name

# The attributes that are the state of DeepSpeed's dynamic loss scale
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def state_of(model: Any, optimizer: Any, saved: Mapping[str, Sequence[int]] | None = None) -> State:
    """Return what the optimizer trains, its state, and BatchNorm's statistics, of this rank.

    Where the engine has fp32 master weights, these are the weights.

    Args:
        model: as `prepare` returned it.
        optimizer: the engine's, without accelerate's wrapper.
        saved: {name: shape of the whole} of the tensors that are to be filled. Optimizer state is
            made for them where there is none yet. Without it nothing is made.
    """
    free_whole_weights(model)
    if not hasattr(model, "zero_optimization_stage"):
        state = state_of_optimizer(model, optimizer, saved, {})
    else:
        from core.zero import master_weights, state_of_parts

        if model.zero_optimization_stage() > 0:
            state = state_of_parts(model, optimizer, saved)
        else:
            inner = getattr(optimizer, "optimizer", optimizer)
            state = state_of_optimizer(model, inner, saved, master_weights(optimizer))
    for prefix, module in model.named_modules():  # BatchNorm's means and variances
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                state.boxes.extend(boxes_of(f"buffer.{clean_name(name)}", buffer))
    return state


def state_of_optimizer(
    model: Any,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, Sequence[int]] | None,
    masters: Mapping[torch.Tensor, torch.Tensor],
) -> State:
    """Return the state of an engine that has each weight, or one slice of it, as `state_of` does.

    Args:
        masters: {weight: its fp32 master weight}, which is trained in its place.
    """
    slices = fsdp1_slices(model)
    names = {}
    for name, weight in model.named_parameters():
        names[masters.get(weight, weight)] = clean_name(name)
    if saved is not None:
        _init_optim_state(optimizer)  # It takes a step of rate 0, after which all state exists
        for weight in trained_by(optimizer):
            own = [f"state.{names[weight]}.{key}" for key in optimizer.state[weight]]
            nothing = slices.get(weight, FlatSlice((), 0, 1)).length == 0
            # FSDP1 expects none for a weight of which this rank has nothing. And a weight that no
            # gradient had reached had none: the step of rate 0 has made it
            if nothing or not any(name in saved for name in own):
                optimizer.state.pop(weight, None)
    boxes: list[LocalBox] = []
    numbers = Numbers()
    for weight in trained_by(optimizer):
        name = names[weight]
        part = slices.get(weight)
        boxes += boxes_of(name, weight, part)
        is_cut = part is not None or isinstance(weight, DTensor)
        entries = optimizer.state.get(weight, {})
        for key in entries:
            value = numbers.as_tensor(entries, key, weight.shape if is_cut else None)
            has_dimensions = value.dim() > 0
            boxes += boxes_of(f"state.{name}.{key}", value, part if has_dimensions else None)

    def after_fill() -> None:
        numbers.put_back()
        for weight, master in masters.items():
            weight.data.copy_(master.data)

    return State(boxes, after_fill)


def trained_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the weights that an optimizer trains, in its order."""
    for group in optimizer.param_groups:
        yield from group["params"]


# ---- FSDP ----
def fsdp1_slices(model: torch.nn.Module) -> dict[torch.Tensor, FlatSlice]:
    """Return {weight: the slice of it that this rank has} under FSDP1, else {}.

    FSDP1 cuts the weights of a layer, laid end to end, into equal parts, so that a rank has the end
    of one, the beginning of another, and nothing of others (torch, fsdp/_flat_param.py).
    """
    slices = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module._handle is None:
            continue
        flat: Any = module._handle.flat_param
        places = zip(flat._params, flat._shapes, flat._shard_param_infos, strict=True)
        for weight, shape, info in places:
            slices[weight] = FlatSlice(tuple(shape), 0, 0)
            if info.in_shard:
                start = info.intra_param_start_idx
                slices[weight] = FlatSlice(tuple(shape), start, info.numel_in_shard)
    return slices


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


# ---- Numbers beside the tensors ----
def get_loss_scale(accelerator: Any, optimizer: Any) -> dict[str, Any]:
    """Return the state of fp16's loss scale, {} without fp16.

    It is in accelerate's scaler, or in DeepSpeed's, which has no function for it.

    Args:
        optimizer: the engine's.
    """
    if accelerator.mixed_precision != "fp16":
        return {}
    if accelerator.scaler:
        return accelerator.scaler.state_dict()
    scaler = deepspeed_scaler(optimizer)
    return {name: scaler[name] for name in LOSS_SCALE if name in scaler}


def restore_loss_scale(accelerator: Any, optimizer: Any, saved: Mapping[str, Any]) -> None:
    """Restore fp16's loss scale, as far as the scaler in force now has the saved values.

    Args:
        saved: what `get_loss_scale` returned under any strategy.
    """
    if accelerator.mixed_precision != "fp16":
        return
    if not accelerator.scaler:
        scaler = deepspeed_scaler(optimizer)
        scaler.update({name: saved[name] for name in LOSS_SCALE if name in saved})
    elif "scale" in saved:
        accelerator.scaler.load_state_dict(dict(saved))


def deepspeed_scaler(zero: Any) -> dict[str, Any]:
    """Return the attributes of DeepSpeed's loss scaler, which can be changed in this dict."""
    # ZeRO-0 calls it by the second name
    return vars(getattr(zero, "loss_scaler", None) or zero.loss_scale_config)


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, float]]:
    """Return the numbers in each group of an optimizer, but for its learning rate.

    Some optimizers count or estimate there: Prodigy's d, the k of schedule-free ones.
    """
    found = []
    for group in optimizer.param_groups:
        numbers = {}
        for key, value in group.items():
            if isinstance(value, int | float) and key not in ("lr", "initial_lr"):
                numbers[key] = value
        found.append(numbers)
    return found


def changed_group_values(
    before: Collection[dict[str, float]], now: Collection[dict[str, float]]
) -> list[dict[str, float]]:
    """Return what training has changed of `group_values`: what a user sets is not saved."""
    changed = []
    for old, new in zip(before, now, strict=True):
        changed.append({key: value for key, value in new.items() if old.get(key) != value})
    return changed


def restore_group_values(optimizer: Any, changed: Collection[dict[str, float]]) -> None:
    """Put back what `changed_group_values` returned.

    If these are numbers, raises ValueError for fewer or more groups, as a mesh has: it is not known
    which is which.
    """
    for group, values in zip(optimizer.param_groups, changed, strict=any(changed)):
        group.update(values)
