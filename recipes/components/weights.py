"""Weights on their way in and out: read once per host where possible, and gathered to be saved."""

import os
from collections.abc import Mapping
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, init_empty_weights
from accelerate.utils import broadcast_object_list
from accelerate.utils.other import extract_model_from_parallel
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import AutoConfig


def read_weights(auto_class: Any, accelerator: Accelerator, name: str, **options: Any) -> Any:
    """Return auto_class.from_pretrained(name, **options), with few copies on the host.

    FSDP broadcasts the weights of rank 0, but transformers 5 reads them on every rank
    (modeling_utils.py: no test of the rank): 8 ranks of an 8B model in fp32 would take 256 GB of a
    host. So the other ranks make the model from its config, in memory that nothing touches. Under
    single, DDP and ZeRO-0 to 2 the weights go straight to the GPU, for DeepSpeed in the type to
    which it casts them before it makes its master weights. Left to transformers are ZeRO-3, which
    splits weights while it loads, and models with new weights, which must be drawn on the host on
    any device.
    """
    fsdp = None
    if accelerator.distributed_type == DistributedType.FSDP:
        fsdp = accelerator.state.fsdp_plugin
    zero = accelerator.state.deepspeed_plugin
    quantized = options.get("quantization_config") is not None

    if fsdp and fsdp.cpu_ram_efficient_loading and accelerator.num_processes > 1 and not quantized:
        skeleton = make_skeleton(auto_class, name, options)
        if getattr(skeleton.config, "quantization_config", None):  # only the files are quantized
            return auto_class.from_pretrained(name, **options)
        if can_be_broadcast(skeleton, accelerator):
            return load_on_rank_0(auto_class, accelerator, name, options, skeleton)
        fsdp.cpu_ram_efficient_loading = False
        # transformers 5.17 would fill the weights of the other ranks with zeros
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"

    stays_whole = fsdp is None and (zero is None or zero.zero_stage < 3)
    if stays_whole and not options.get("output_loading_info"):
        casts_to = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)
        if zero and casts_to and not quantized:
            options["dtype"] = casts_to
        if accelerator.device.type == "cuda":
            options["device_map"] = {"": accelerator.device}
    return auto_class.from_pretrained(name, **options)


def can_be_broadcast(model: torch.nn.Module, accelerator: Accelerator) -> bool:
    """Whether FSDP gives all of the model's tensors to the other ranks.

    FSDP1 leaves out ignored modules; accelerate's broadcast for FSDP2 fails at buffers that are
    saved, such as BART's final_logits_bias.
    """
    if accelerator.state.fsdp_plugin.ignored_modules is not None:
        return False
    saved = model.state_dict()
    return not (accelerator.is_fsdp2 and any(name in saved for name, _ in model.named_buffers()))


def make_skeleton(auto_class: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the model of a config: parameters on the meta device, buffers with their values."""
    how = {key: options[key] for key in ("dtype", "attn_implementation")}
    for_loading = {"quantization_config", "output_loading_info", "ignore_mismatched_sizes", *how}
    of_config = {key: value for key, value in options.items() if key not in for_loading}
    config = AutoConfig.from_pretrained(name, **of_config)
    with init_empty_weights(include_buffers=False):
        model = auto_class.from_config(config, **how)
    model.tie_weights()
    return model


def load_on_rank_0(
    auto_class: Any,
    accelerator: Accelerator,
    name: str,
    options: Mapping[str, Any],
    skeleton: Any,
) -> Any:
    """Return from_pretrained's result on rank 0; elsewhere the skeleton, in untouched memory.

    The strategy must broadcast the parameters. Loading info, if asked for, is rank 0's everywhere.
    """
    model = None
    told = None
    if accelerator.is_main_process:
        loaded = auto_class.from_pretrained(name, **options)
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        types = {key: weight.dtype for key, weight in model.named_parameters()}
        told = types, getattr(model, "generation_config", None), info
    types, generation_config, info = broadcast_object_list([told])[0]
    if not accelerator.is_main_process:
        model = reserve_memory(skeleton, types).eval()
        if generation_config is not None:
            model.generation_config = generation_config
    return (model, *info) if info else model


def reserve_memory(model: Any, types: Mapping[str, torch.dtype]) -> Any:
    """Give the parameters of a skeleton memory that is never written to, and return it.

    Such memory takes no room.

    types: {name: dtype}, which from_pretrained may choose parameter by parameter. The parameters
    cannot stay on the meta device, since accelerate tells them apart by their address.
    """
    reserved = {}  # (meta weight, its new one) by the identity of the first: tied weights stay one
    for prefix, module in model.named_modules():
        for key, weight in module.named_parameters(prefix, recurse=False):
            if id(weight) not in reserved:
                empty = torch.empty(weight.shape, dtype=types.get(key, weight.dtype))
                reserved[id(weight)] = weight, torch.nn.Parameter(empty, weight.requires_grad)
            module._parameters[key.rpartition(".")[2]] = reserved[id(weight)][1]
    return model


def whole_weights(accelerator: Accelerator, model: Any) -> dict[str, torch.Tensor]:
    """Return the weights by name, whole and on the host of rank 0.

    Of a model with adapters, FSDP2 and ZeRO-3 gather only what is trained: gathering the frozen base
    as well would take as much host memory as the model has.
    """
    adapters_only = hasattr(extract_model_from_parallel(model), "peft_config")
    zero = accelerator.state.deepspeed_plugin
    if adapters_only and accelerator.is_fsdp2:
        options = StateDictOptions(
            full_state_dict=True, cpu_offload=True, ignore_frozen_params=True
        )
        return get_model_state_dict(model, options=options)
    if adapters_only and zero and zero.zero_stage == 3:
        return model._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
    return accelerator.get_state_dict(model)
