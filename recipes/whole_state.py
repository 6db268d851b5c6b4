"""Training state as whole tensors by name, gathered from and put back into every strategy; and which strategy is in force.

fault_tolerance.py saves and restores by it, so that a checkpoint fits any YAML and any number of ranks.
"""

from dataclasses import replace

import torch
from accelerate import DistributedType
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True, strict=False)


def strategy_in_force(accelerator):
    """Return (name, FSDP version or 0, ZeRO stage or -1) of what accelerate really runs, whatever it was asked for."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return f"DeepSpeed ZeRO-{accelerator.state.deepspeed_plugin.zero_stage}", 0, accelerator.state.deepspeed_plugin.zero_stage
    if accelerator.distributed_type != DistributedType.FSDP:
        return "one process" if accelerator.num_processes == 1 else "DDP", 0, -1
    plugin, hybrid = accelerator.state.fsdp_plugin, getattr(accelerator.parallelism_config, "dp_replicate_size", 1) > 1
    how = (("FULL_SHARD", "SHARD_GRAD_OP"), ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2"))[hybrid][not plugin.reshard_after_forward]
    return f"FSDP{plugin.fsdp_version} {plugin.sharding_strategy.name if plugin.fsdp_version == 1 else how}", plugin.fsdp_version, -1


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
        state = gather_zero_state(model, accelerator.is_main_process)
    elif pairs := master_weights(model, optimizer.optimizer):
        pairs = pairs if accelerator.is_main_process else {}  # all have the same
        entries = {name: optimizer.optimizer.optimizer.state[master] for name, (_, master) in pairs.items()}
        state = {name: master.detach().cpu() for name, (_, master) in pairs.items()} | flatten("state", entries)
    else:
        inner = model.module if zero_stage(accelerator) == 0 else model  # torch takes off the other wrappers
        fsdp1 = type(model).__name__ == "FullyShardedDataParallel"  # torch 2.13 then drops frozen weights on ranks that have none: KeyError
        weights, optimizer_state = get_state_dict(inner, optimizer.optimizer, options=replace(WHOLE, ignore_frozen_params=not fsdp1))
        entries = optimizer_state.get("state", {})
        state = {name: weights[name] for name in entries} | flatten("state", entries)
    state = state if accelerator.is_main_process else {}
    # bitsandbytes shares its small maps between weights, which safetensors refuses
    return {name: tensor.clone() if tensor.numel() <= 4096 else tensor.contiguous() for name, tensor in state.items()}


def restore_state(accelerator, model, optimizer, state):
    """Put a gathered state back, each rank its part. Return whether all of it is there afterwards, which rank 0 knows."""
    if zero_stage(accelerator) > 0:
        restore_zero_state(model, state)
    elif pairs := master_weights(model, optimizer.optimizer):
        for name, (weight, master) in pairs.items():
            master.data.copy_(state[name])
            weight.data.copy_(master.data)
            for key, tensor in optimizer.optimizer.optimizer.state[master].items():
                tensor.copy_(state[f"state.{name}.{key}"])
    else:  # rates and decay stay those of the command line
        inner = model.module if zero_stage(accelerator) == 0 else model
        _, now = get_state_dict(inner, optimizer.optimizer, options=StateDictOptions(ignore_frozen_params=True))
        entries = unflatten("state", now["state"], state)
        set_state_dict(inner, optimizer.optimizer, model_state_dict={n: state[n] for n in entries}, optim_state_dict=now | {"state": entries}, options=WHOLE)
    back = gather_state(accelerator, model, optimizer)
    return not accelerator.is_main_process or back.keys() == state.keys() and all(torch.equal(back[n], state[n]) for n in state)


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
    """{name.key.key: tensor} of nested optimizer state; bitsandbytes nests it, and counts steps in plain numbers."""
    if not isinstance(value, dict):
        return {name: torch.as_tensor(value)}
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


def gather_zero_state(model, keep):
    """The same from ZeRO-1 to 3, which hold flat parts of the fp32 weights (deepspeed/utils/tensor_fragment.py)."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
    state, step = {}, next(entry["step"] for entry in model.optimizer.optimizer.state.values() if "step" in entry)
    for name, weight in zero_weights(model).items():
        for key in ("", "exp_avg", "exp_avg_sq"):
            whole = safe_get_full_optimizer_state(weight, key) if key else safe_get_full_fp32_param(weight)
            if keep:
                state[f"state.{name}.{key}" if key else name] = whole.to("cpu", copy=True)
        state[f"state.{name}.step"] = torch.tensor(float(step))
    return state


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
