"""Training state as whole tensors by name, gathered from every strategy and put back into it.

A run saves and restores by these functions, so that a checkpoint fits any YAML and any number of
ranks.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, distribute_tensor

from components.strategy import Strategy

State = dict[str, torch.Tensor]
Masters = Mapping[str, tuple[torch.Tensor, torch.Tensor]]

WHOLE = StateDictOptions(
    full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False
)
MOMENTS = ("exp_avg", "exp_avg_sq")  # what AdamW keeps of each weight besides the step
NOTHING = slice(0, 0)
LARGEST_MAP = 4096  # elements; bitsandbytes' maps are smaller
# What DeepSpeed's dynamic loss scale depends on, besides its settings
LOSS_SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def shards_state_of_deepspeed(accelerator: Accelerator) -> bool:
    """Return whether ZeRO-1 to 3 hold the training state in flat parts."""
    return (Strategy.of(accelerator).zero_stage or 0) > 0


def is_fsdp1(model: torch.nn.Module) -> bool:
    """Return whether FSDP1 wraps the model: its weights are then views of flat parts."""
    return type(model).__name__ == "FullyShardedDataParallel"


def gather_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: AcceleratedOptimizer
) -> State:
    """Gather the whole training state on the host of rank 0. Every rank must take part.

    Rank 0 needs 12 bytes of memory for each trained parameter.

    Returns:
        On rank 0 {NAME: trained weight, state.NAME.KEY: its optimizer state, buffer.NAME: running
        statistic}, whole tensors on the host; {} on the other ranks. KEY is the optimizer's own:
        step, exp_avg, exp_avg_sq for AdamW. Where the engine has fp32 master weights, these are
        the weights.
    """
    if shards_state_of_deepspeed(accelerator):
        state = gather_zero_state(accelerator, model)
    elif pairs := master_weights(model, optimizer.optimizer):
        state = gather_master_state(accelerator, pairs, optimizer.optimizer.optimizer)
    elif Strategy.of(accelerator).fsdp_version:
        state = gather_fsdp_state(model, optimizer.optimizer)
    else:
        state = gather_unsharded_state(accelerator, model, optimizer.optimizer)
    for name, buffer in running_statistics(model):
        state[name] = buffer.cpu()
    kept = {}
    if accelerator.is_main_process:
        kept = {name: storable(tensor) for name, tensor in state.items()}
    return kept


def gather_zero_state(accelerator: Accelerator, model: torch.nn.Module) -> State:
    """Return {name: whole tensor on the host} of ZeRO-1 to 3 on rank 0, {} elsewhere."""
    state = {}
    for name, tensor in zero_parts(model):  # every rank must go through all of them
        if accelerator.is_main_process:
            state[name] = tensor.to("cpu", copy=True)
    return state


def gather_master_state(
    accelerator: Accelerator, pairs: Masters, optimizer: torch.optim.Optimizer
) -> State:
    """Return the state of ZeRO-0 in bf16 or fp16 on rank 0, {} on the others, which have the same.

    pairs: of `master_weights`. optimizer: the one that DeepSpeed wraps.
    """
    kept = pairs if accelerator.is_main_process else {}
    return {name: tensor.cpu() for name, tensor in master_parts(kept, optimizer)}


def gather_unsharded_state(
    accelerator: Accelerator, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> State:
    """Return the state of one process, DDP or ZeRO-0 in fp32 on rank 0, {} on the others.

    torch's get_state_dict is not for these: it looks up each name of the model's state_dict, and
    the scales of bitsandbytes' int8 layers (SCB) are no attributes of their modules.
    """
    state = {}
    if accelerator.is_main_process:
        _init_optim_state(optimizer)  # as get_state_dict does: there may not have been a step yet
        for name, weight in trained_weights(model, optimizer).items():
            state[name] = weight.detach().cpu()
            for key, value in optimizer.state[weight].items():
                place = f"state.{name}.{saved_key(optimizer, key)}"
                state[place] = torch.as_tensor(value).cpu()
    return state


def trained_weights(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, torch.nn.Parameter]:
    """Return {name: weight} of what the optimizer trains, in its order, without wrappers' names."""
    names = {weight: clean_name(name) for name, weight in model.named_parameters()}
    groups = optimizer.param_groups
    return {names[weight]: weight for group in groups for weight in group["params"]}


def gather_fsdp_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> State:
    """Return the state of FSDP by torch's get_state_dict: on rank 0, {} on the others."""
    # FSDP1 must be asked for frozen weights too: to leave them out, torch 2.13 deletes them on
    # every rank, also on those that have none, which is a KeyError.
    options = replace(WHOLE, ignore_frozen_params=not is_fsdp1(model))
    weights, optimizer_state = get_state_dict(model, optimizer, options=options)
    entries = optimizer_state.get("state", {})
    state = {name: weights[name] for name in entries}
    state.update(flatten("state", entries))
    return state


def storable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as safetensors takes it: contiguous, with memory of its own.

    bitsandbytes shares its small maps between weights, so small tensors are copied.
    """
    if tensor.numel() <= LARGEST_MAP:
        return tensor.clone()
    return tensor.contiguous()


def restore_state(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: AcceleratedOptimizer,
    state: Mapping[str, torch.Tensor],
) -> bool:
    """Put a gathered state back, each rank its part, and compare what is there afterwards.

    Where the engine allows it, tensors are copied in place, one at a time: nothing is held twice,
    and bitsandbytes' paged optimizer state stays in the memory that it was given.

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

    if shards_state_of_deepspeed(accelerator):
        restore_zero_state(model, trained)
        return all_is_back(zero_parts(model), trained)
    if pairs := master_weights(model, optimizer.optimizer):
        inner = optimizer.optimizer.optimizer
        restore_master_state(pairs, inner, trained)
        return all_is_back(master_parts(pairs, inner), trained)
    return restore_in_place(model, optimizer.optimizer, trained)


def all_is_back(
    parts: Iterable[tuple[str, torch.Tensor]], state: Mapping[str, torch.Tensor]
) -> bool:
    """Return whether parts, pairs of name and tensor, have every name and value of `state`."""
    equal = {}
    for name, tensor in parts:  # to the end, since zero_parts needs every rank for each
        if name in state:
            equal[name] = torch.equal(tensor.cpu(), state[name])
    return equal.keys() == state.keys() and all(equal.values())


def running_statistics(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (buffer.NAME, buffer) of what training changes besides the weights.

    These are the means and variances of BatchNorm.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield f"buffer.{clean_name(name)}", buffer


def clean_name(name: str) -> str:
    """Return a parameter's name without the words that wrappers put into it.

    DDP, DeepSpeed, torch.compile and FSDP2's activation checkpointing each add their own.
    """
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def first_nonfinite(state: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor with a number in it that is not finite, or None.

    The sum of a tensor is not finite if one of its numbers is not, and takes a thirtieth of the
    time of a look at each (0.57 against 18 GB/s on one thread). Finite numbers can have a sum that
    is not, so only then each is looked at.
    """
    for name, tensor in state.items():
        if not tensor.is_floating_point() or tensor.sum().isfinite():
            continue
        if not tensor.isfinite().all():
            return name
    return None


# ---- The loss scale of fp16 ----
def get_loss_scale(accelerator: Accelerator, optimizer: AcceleratedOptimizer) -> dict[str, Any]:
    """Return what fp16's dynamic loss scale depends on, as JSON; {} without fp16.

    accelerate's scaler keeps it, or DeepSpeed, which has no function for it.
    """
    if accelerator.mixed_precision != "fp16":
        return {}
    if accelerator.scaler:
        return accelerator.scaler.state_dict()
    scaler = scaler_of_deepspeed(optimizer.optimizer)
    return {name: scaler[name] for name in LOSS_SCALE if name in scaler}


def restore_loss_scale(
    accelerator: Accelerator, optimizer: AcceleratedOptimizer, saved: Mapping[str, Any]
) -> None:
    """Put back what `get_loss_scale` returned when the checkpoint was written."""
    if accelerator.mixed_precision != "fp16":
        return
    if accelerator.scaler:
        if "scale" in saved:
            accelerator.scaler.load_state_dict(dict(saved))
        return
    scaler = scaler_of_deepspeed(optimizer.optimizer)
    scaler.update({name: value for name, value in saved.items() if name in scaler})


def scaler_of_deepspeed(zero: Any) -> dict[str, Any]:
    """Return the attributes of DeepSpeed's loss scaler, to be read and written."""
    return vars(getattr(zero, "loss_scaler", None) or zero.loss_scale_config)


# ---- One process, DDP, FSDP, and ZeRO-0 in fp32 ----


def restore_in_place(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, torch.Tensor]
) -> bool:
    """Copy a gathered state into the weights and the optimizer, tensor by tensor.

    For one process, DDP, FSDP and ZeRO-0 in fp32. Returns whether state and optimizer name the same
    tensors, and each now has the saved values.
    """
    _init_optim_state(optimizer)  # a step of rate 0, after which all of its state exists
    weights = trained_weights(model, optimizer)
    parts = fsdp1_parts(model)
    places: dict[str, Any] = {}  # {name: (tensor or number, this rank's part of the whole or None)}
    for name, weight in weights.items():
        part = parts.get(weight)
        places[name] = (weight, part)
        entries = optimizer.state[weight]
        for key, value in entries.items():
            place = f"state.{name}.{saved_key(optimizer, key)}"
            places[place] = (value, part)
            is_number = not isinstance(value, torch.Tensor)  # bitsandbytes' count of steps
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
        if part == NOTHING:  # FSDP1 takes state to mean that the rank has some of the weight
            optimizer.state.pop(weight, None)
    return all(arrived)


def fsdp1_parts(model: torch.nn.Module) -> dict[torch.Tensor, slice]:
    """Return {weight: the slice of its flattened whole that this rank has} of FSDP1, else {}.

    FSDP1 cuts the weights of a layer, laid end to end, into equal parts, so that a rank has the end
    of one and the beginning of another, all of some, and nothing of others (torch/distributed/fsdp/
    _flat_param.py, _ShardParamInfo). Without it, the weights would have to be whole on each rank.
    """
    parts = {}
    for module in FullyShardedDataParallel.fsdp_modules(model):
        if module._handle is None:
            continue
        flat = module._handle.flat_param
        for weight, info in zip(flat._params, flat._shard_param_infos, strict=True):
            parts[weight] = NOTHING
            if info.in_shard:
                parts[weight] = slice(info.intra_param_start_idx, info.intra_param_end_idx + 1)
    return parts


def saved_key(optimizer: Any, key: str) -> str:
    """Return the name under which a checkpoint has an entry of optimizer state.

    bitsandbytes nests its own entries in state_dict(), so that FSDP does not take them for tensors
    of the weight's shape (bitsandbytes/optim/optimizer.py).
    """
    if key in getattr(optimizer, "non_castable_tensor_keys", ()):
        return f"{optimizer._FSDP_WRAPPED_QUANT_STATE_KEY}.{key}"
    return key


def copy_whole(saved: torch.Tensor, target: torch.Tensor, part: slice | None = None) -> bool:
    """Copy a whole tensor on the host into a tensor, or into this rank's part of it.

    part: of `fsdp1_parts`; a DTensor knows its own. Returns whether it arrived.
    """
    if isinstance(target, DTensor):
        # src_data_rank=None: each rank cuts its own part, without communication
        mesh, placements = target.device_mesh, target.placements
        saved = distribute_tensor(saved, mesh, placements, src_data_rank=None).to_local()
        target = target.to_local()
    elif part is not None and saved.dim():  # a count of steps is whole everywhere
        saved = saved.flatten()[part]
        target = target.view(-1)
    target.copy_(saved)
    return torch.equal(target, saved.to(target.device, target.dtype))


def flatten(name: str, value: Any) -> State:
    """Return {name.key.key: tensor on the host} of nested optimizer state.

    bitsandbytes nests its state and counts steps in plain numbers; DeepSpeed's ZeRO-0 keeps its
    state on the GPU.
    """
    if not isinstance(value, dict):
        return {name: torch.as_tensor(value).cpu()}
    leaves = {}
    for key, inner in value.items():
        leaves.update(flatten(f"{name}.{key}", inner))
    return leaves


# ---- ZeRO-0 in bf16 or fp16 ----


def master_weights(
    model: torch.nn.Module, zero: Any
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return {name: (weight, fp32 master weight)} of ZeRO-0 in bf16 or fp16, {} otherwise.

    Each rank has all of them whole. zero: DeepSpeed's optimizer.
    """
    names = {weight: name.removeprefix("module.") for name, weight in model.named_parameters()}
    low_groups = getattr(zero, "fp16_groups", [])
    master_groups = getattr(zero, "fp32_groups", [])
    pairs = {}
    for weights, masters in zip(low_groups, master_groups, strict=True):
        for weight, master in zip(weights, masters, strict=True):
            pairs[names[weight]] = (weight, master)
    return pairs


def master_parts(
    pairs: Masters, optimizer: torch.optim.Optimizer
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of ZeRO-0's fp32 master weights and of their optimizer state."""
    for name, (_, master) in pairs.items():
        yield name, master.detach()
        yield from flatten(f"state.{name}", optimizer.state[master]).items()


def restore_master_state(
    pairs: Masters, optimizer: torch.optim.Optimizer, state: Mapping[str, torch.Tensor]
) -> None:
    """Copy a gathered state into ZeRO-0's master weights, their 16-bit copies and their state."""
    for name, (weight, master) in pairs.items():
        master.data.copy_(state[name])
        weight.data.copy_(master.data)
        for key, tensor in optimizer.state[master].items():
            tensor.copy_(state[f"state.{name}.{key}"])


# ---- ZeRO-1 to 3 ----


def zero_weights(model: Any) -> dict[str, Any]:
    """Return {name: weight} of what ZeRO-1 to 3 train, each linked with its optimizer state.

    In ZeRO-1 and 2 DeepSpeed 0.19 links only the first parameter group, and none before the first
    step, so it is asked to do it again.
    """
    if hasattr(model.optimizer, "_lazy_init_hp_params_optimizer_state"):
        model.optimizer._hp_optimizer_states_linked = False
        model.optimizer._lazy_init_hp_params_optimizer_state()
    weights = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            weights[name.removeprefix("module.")] = weight
    return weights


def zero_parts(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, whole tensor) of all that ZeRO-1 to 3 train, one at a time.

    They come out of the flat parts of the fp32 weights and their state that the ranks hold
    (deepspeed/utils/tensor_fragment.py). Every rank must go through all of them.
    """
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    entries = model.optimizer.optimizer.state.values()
    step = next(entry["step"] for entry in entries if "step" in entry)
    for name, weight in zero_weights(model).items():
        yield name, safe_get_full_fp32_param(weight)
        for key in MOMENTS:
            yield f"state.{name}.{key}", safe_get_full_optimizer_state(weight, key)
        yield f"state.{name}.step", torch.tensor(float(step))


def restore_zero_state(model: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Fill the flat parts of ZeRO-1 to 3, and the weights computed with, from a gathered state."""
    zero = model.optimizer
    make_zero_moments(zero, state)
    for name, weight in zero_weights(model).items():
        saved = {None: state[name]}  # DeepSpeed's key for the fp32 weight itself
        for key in MOMENTS:
            saved[key] = state[f"state.{name}.{key}"]
        if hasattr(weight, "ds_tensor"):
            restore_zero3_weight(zero, weight, saved)
        else:  # ZeRO-1 and 2
            for key, whole in saved.items():
                weight.set_full_hp_param(whole.to(weight.device), key)
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()


def make_zero_moments(zero: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Give the flat parts the saved step, and moments of zeros to be filled.

    Before the first step they have no optimizer state. zero: DeepSpeed's optimizer.
    """
    step = next(tensor for name, tensor in state.items() if name.endswith(".step"))
    parts = getattr(zero, "fp32_partitioned_groups_flat", None)  # ZeRO-3
    for flat in parts or zero.single_partition_of_fp32_groups:
        entry = {"step": step.to(flat.device, copy=True)}
        for key in MOMENTS:
            entry[key] = torch.zeros_like(flat)
        zero.optimizer.state[flat] = entry


def restore_zero3_weight(zero: Any, weight: Any, saved: Mapping[str | None, torch.Tensor]) -> None:
    """Fill this rank's part of one weight of ZeRO-3, then the weight that is computed with.

    saved: {None: whole weight, name of a moment: whole moment}. Every rank must take part.
    """
    import deepspeed

    size = weight.ds_tensor.numel()
    start = size * torch.distributed.get_rank(weight.ds_process_group)
    for key, whole in saved.items():
        # Part by part: DeepSpeed's function for the whole fails where the last part is padded
        part = whole.flatten()[start : start + size]
        part = torch.nn.functional.pad(part, (0, size - part.numel()))
        zero.set_local_hp_param(part, weight, key)
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data.copy_(saved[None].view(weight.shape))
