"""Training state as whole tensors by name, gathered from and put back into every strategy; and which strategy is in force.

fault_tolerance.py saves and restores by it, so that a checkpoint fits any YAML and any number of ranks.
"""

from dataclasses import replace

import torch
from accelerate import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, _init_optim_state, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


def strategy_in_force(accelerator):
    """Return (name, FSDP version or 0, ZeRO stage or -1) of what accelerate really runs, whatever it was asked for."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}", 0, accelerator.state.deepspeed_plugin.zero_stage
    if accelerator.distributed_type != DistributedType.FSDP:
        return "one process" if accelerator.num_processes == 1 else "DDP", 0, -1
    plugin, hybrid = accelerator.state.fsdp_plugin, getattr(accelerator.parallelism_config, "dp_replicate_size", 1) > 1
    if plugin.fsdp_version == 1:
        return f"FSDP1 {fsdp1_strategy(accelerator)}", 1, -1
    how = (("FULL_SHARD", "SHARD_GRAD_OP"), ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"))[hybrid][not plugin.reshard_after_forward]
    return f"FSDP2 {how}", 2, -1


def fsdp1_strategy(accelerator):
    """Name of the strategy that FSDP1 really runs: over one rank torch turns each of them into NO_SHARD
    (torch/distributed/fsdp/_init_utils.py, _init_core_state), and hybrid ones shard over the GPUs of one host."""
    asked = accelerator.state.fsdp_plugin.sharding_strategy.name
    shards = accelerator.num_processes
    if asked.startswith("_HYBRID") or asked.startswith("HYBRID"):
        shards = getattr(torch, accelerator.device.type).device_count()
    return asked if shards > 1 else "NO_SHARD"


def zero_stage(accelerator):
    """ZeRO stage of DeepSpeed, -1 without it."""
    return getattr(accelerator.state.deepspeed_plugin, "zero_stage", -1)


def master_weights(model, zero):
    """{name: (weight, fp32 master weight)} of ZeRO-0 in bf16 or fp16, each rank whole; {} of everything else."""
    names = {weight: name.removeprefix("module.") for name, weight in model.named_parameters()}
    groups = zip(getattr(zero, "fp16_groups", []), getattr(zero, "fp32_groups", []), strict=True)
    return {names[weight]: (weight, master) for low, high in groups for weight, master in zip(low, high, strict=True)}


def gather_state(accelerator, model, optimizer):
    """Return {NAME: trained weight, state.NAME.KEY: its optimizer state} on rank 0, whole and on the host, {} elsewhere.
    Every rank takes part. KEY is the optimizer's: step, exp_avg, exp_avg_sq for AdamW. Weights are the engine's fp32 master weights, if any. Rank 0 needs 12 bytes of memory a trained parameter."""
    if zero_stage(accelerator) > 0:
        kept = accelerator.is_main_process
        state = {name: tensor.to("cpu", copy=True) for name, tensor in zero_parts(model) if kept}
    elif pairs := master_weights(model, optimizer.optimizer):
        pairs = pairs if accelerator.is_main_process else {}  # all have the same
        state = {name: tensor.cpu() for name, tensor in master_parts(pairs, optimizer.optimizer.optimizer)}
    else:
        inner = model.module if zero_stage(accelerator) == 0 else model  # torch takes off the other wrappers
        fsdp1 = type(model).__name__ == "FullyShardedDataParallel"  # torch 2.13 then drops frozen weights on ranks that have none: KeyError
        weights, optimizer_state = get_state_dict(inner, optimizer.optimizer, options=replace(WHOLE, ignore_frozen_params=not fsdp1))
        entries = optimizer_state.get("state", {})
        state = {name: weights[name] for name in entries} | flatten("state", entries)
    state |= {name: buffer.cpu() for name, buffer in running_statistics(model)}
    state = state if accelerator.is_main_process else {}
    # bitsandbytes shares its small maps between weights, which safetensors refuses
    return {name: tensor.clone() if tensor.numel() <= 4096 else tensor.contiguous() for name, tensor in state.items()}


def restore_state(accelerator, model, optimizer, state):
    """Put a gathered state back, each rank its part. Return whether all of it is there afterwards: on rank 0 for every
    rank's part, or on each rank for its own.

    state: {name: tensor on the host}, mapped from the checkpoint's file, so that the ranks of a host share its memory.
    Where the engine allows it, tensors are copied in place, one at a time: nothing is held twice, and bitsandbytes'
    paged optimizer state stays in the memory that it was given."""
    buffers = dict(running_statistics(model))
    if not buffers.keys() <= state.keys():
        return False
    for name, buffer in buffers.items():
        buffer.copy_(state[name])
    state = {name: tensor for name, tensor in state.items() if name not in buffers}
    if zero_stage(accelerator) > 0:
        restore_zero_state(model, state)
        return all_is_back(zero_parts(model), state)
    if pairs := master_weights(model, optimizer.optimizer):
        inner = optimizer.optimizer.optimizer
        for name, (weight, master) in pairs.items():
            master.data.copy_(state[name])
            weight.data.copy_(master.data)
            for key, tensor in inner.state[master].items():
                tensor.copy_(state[f"state.{name}.{key}"])
        return all_is_back(master_parts(pairs, inner), state)
    if type(model).__name__ == "FullyShardedDataParallel":  # FSDP1, whose weights are views of flat parts
        set_fsdp1_state(model, optimizer.optimizer, state)
        back = gather_state(accelerator, model, optimizer)
        return not accelerator.is_main_process or all_is_back(back.items(), state)
    return restore_in_place(model, optimizer.optimizer, state)


def running_statistics(model):
    """Yield (buffer.NAME, buffer) of what training changes besides the weights: BatchNorm's means and variances."""
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.modules.batchnorm._NormBase):
            for name, buffer in module.named_buffers(prefix, recurse=False):
                yield f"buffer.{clean_name(name)}", buffer


def set_fsdp1_state(model, optimizer, state):
    """Put a gathered state back into FSDP1's flat parts; rates and decay stay those of the command line."""
    _, now = get_state_dict(model, optimizer, options=StateDictOptions(ignore_frozen_params=True))
    entries = unflatten("state", now["state"], state)
    weights = {name: state[name] for name in entries}
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=now | {"state": entries}, options=WHOLE)


def restore_in_place(model, optimizer, state):
    """Copy a gathered state into the weights and the optimizer of one process, DDP, FSDP2 or ZeRO-0 in fp32, tensor by
    tensor. Return whether state and optimizer name the same tensors, and each now has the saved values."""
    _init_optim_state(optimizer)  # a step of rate 0, after which every tensor of the optimizer's state exists
    names = {weight: clean_name(name) for name, weight in model.named_parameters()}
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    places = {names[weight]: weight for weight in trained}
    for weight in trained:
        for key, value in optimizer.state[weight].items():
            place = f"state.{names[weight]}.{saved_key(optimizer, key)}"
            places[place] = value
            if not isinstance(value, torch.Tensor) and place in state:  # bitsandbytes counts steps in plain numbers
                optimizer.state[weight][key] = type(value)(state[place].item())
    if places.keys() != state.keys():
        return False
    with torch.no_grad():
        arrived = [copy_whole(state[name], place) for name, place in places.items() if isinstance(place, torch.Tensor)]
    return all(arrived)


def clean_name(name):
    """A parameter's name without what DDP, DeepSpeed, torch.compile and FSDP2's activation checkpointing put into it."""
    for wrapper in ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name.removeprefix("module.")


def saved_key(optimizer, key):
    """The name under which a checkpoint has an entry of optimizer state: bitsandbytes nests its own in state_dict(), so
    that FSDP does not take them for tensors of the weight's shape (bitsandbytes/optim/optimizer.py)."""
    nested = getattr(optimizer, "non_castable_tensor_keys", ())
    return f"{optimizer._FSDP_WRAPPED_QUANT_STATE_KEY}.{key}" if key in nested else key


def copy_whole(saved, target):
    """Copy a whole tensor on the host into `target`, a tensor or this rank's part of a DTensor. Return whether it
    arrived."""
    part = saved
    if isinstance(target, DTensor):  # src_data_rank=None: each rank cuts its own part, without communication
        part = distribute_tensor(saved, target.device_mesh, target.placements, src_data_rank=None).to_local()
        target = target.to_local()
    target.copy_(part)
    return torch.equal(target, part.to(target.device, target.dtype))


def all_is_back(parts, state):
    """Whether parts, pairs of name and tensor, are what `state` has: the same names and the same values."""
    equal = {name: torch.equal(tensor.cpu(), state[name]) for name, tensor in parts if name in state}
    return equal.keys() == state.keys() and all(equal.values())


def first_nonfinite(state):
    """Return the name of the first tensor with a number in it that is not finite, or None.

    The sum of a tensor is not finite if one of its numbers is not, and takes a thirtieth of the time of a look at each
    (0.57 against 18 GB/s on one thread). Finite numbers can have a sum that is not, so only then each is looked at."""
    for name, tensor in state.items():
        if tensor.is_floating_point() and not tensor.sum().isfinite() and not tensor.isfinite().all():
            return name
    return None


def loss_scale(accelerator, optimizer, saved):
    """Put back what was saved of fp16's loss scale, which accelerate or DeepSpeed keeps, and return it; {} without fp16."""
    if accelerator.mixed_precision != "fp16":
        return {}
    if accelerator.scaler:
        accelerator.scaler.load_state_dict(saved if "scale" in saved else accelerator.scaler.state_dict())
        return accelerator.scaler.state_dict()
    scaler = vars(getattr(optimizer.optimizer, "loss_scaler", None) or optimizer.optimizer.loss_scale_config)
    scaler.update({name: value for name, value in saved.items() if name in scaler})
    return {name: scaler[name] for name in ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis") if name in scaler}


def flatten(name, value):
    """{name.key.key: tensor on the host} of nested optimizer state; bitsandbytes nests it, and counts steps in plain
    numbers."""
    if not isinstance(value, dict):
        return {name: torch.as_tensor(value).cpu()}  # DeepSpeed's ZeRO-0 keeps it on the GPU
    return {key: leaf for inner in value for key, leaf in flatten(f"{name}.{inner}", value[inner]).items()}


def unflatten(name, like, state):
    """The inverse: the leaves of `state` in the form of `like`."""
    if isinstance(like, dict):
        return {key: unflatten(f"{name}.{key}", like[key], state) for key in like}
    return state[name] if isinstance(like, torch.Tensor) else state[name].item()


def zero_weights(model):
    """Return what ZeRO-1 to 3 train, by name, linked with its optimizer state.
    In ZeRO-1 and 2 DeepSpeed 0.19 links the first parameter group alone, and none before the first step."""
    if hasattr(model.optimizer, "_lazy_init_hp_params_optimizer_state"):
        model.optimizer._hp_optimizer_states_linked = False
        model.optimizer._lazy_init_hp_params_optimizer_state()
    return {name.removeprefix("module."): weight for name, weight in model.named_parameters() if weight.requires_grad}


def zero_parts(model):
    """Yield (name, whole tensor) of all that ZeRO-1 to 3 train, one at a time, out of the flat parts of the fp32 weights
    and their state that they hold (deepspeed/utils/tensor_fragment.py). Every rank must go through all of it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    step = next(entry["step"] for entry in model.optimizer.optimizer.state.values() if "step" in entry)
    for name, weight in zero_weights(model).items():
        yield name, safe_get_full_fp32_param(weight)
        for key in ("exp_avg", "exp_avg_sq"):
            yield f"state.{name}.{key}", safe_get_full_optimizer_state(weight, key)
        yield f"state.{name}.step", torch.tensor(float(step))


def master_parts(pairs, optimizer):
    """Yield (name, tensor) of the fp32 master weights of ZeRO-0 in bf16 or fp16, and of their optimizer state."""
    for name, (_, master) in pairs.items():
        yield name, master.detach()
        yield from flatten(f"state.{name}", optimizer.state[master]).items()


def restore_zero_state(model, state):
    """Fill the flat parts, which have no optimizer state before the first step, and what is computed with."""
    import deepspeed
    zero, step = model.optimizer, next(tensor for name, tensor in state.items() if name.endswith(".step"))
    for flat in getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups:
        zero.optimizer.state[flat] = {"step": step.to(flat.device, copy=True)} | {key: torch.zeros_like(flat) for key in ("exp_avg", "exp_avg_sq")}
    for name, weight in zero_weights(model).items():
        for key, whole in ((None, state[name]), *((key, state[f"state.{name}.{key}"]) for key in ("exp_avg", "exp_avg_sq"))):
            if not hasattr(weight, "ds_tensor"):  # ZeRO-1 and 2
                weight.set_full_hp_param(whole.to(weight.device), key)
                continue
            # Part by part: DeepSpeed's function for the whole fails where the last part is padded
            size, rank = weight.ds_tensor.numel(), torch.distributed.get_rank(weight.ds_process_group)
            part = whole.flatten()[size * rank : size * (rank + 1)]
            zero.set_local_hp_param(torch.nn.functional.pad(part, (0, size - part.numel())), weight, key)
        if hasattr(weight, "ds_tensor"):
            with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
                weight.data.copy_(state[name].view(weight.shape))
    if hasattr(zero, "update_lp_params"):
        zero.update_lp_params()
