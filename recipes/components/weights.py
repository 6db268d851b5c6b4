# SPDX-License-Identifier: Apache-2.0
"""A pretrained model's weights, read once per host where possible."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator, init_empty_weights
from accelerate.utils import broadcast_object_list
from transformers import AutoConfig

from core.engine import Layout, read_on_every_rank
from core.workarounds import fsdp_plugin, mixed_dtype

# Options of from_pretrained that from_config does not take
ONLY_FOR_LOADING = ("quantization_config", "output_loading_info", "ignore_mismatched_sizes")


def load_pretrained(auto_class: Any, layout: Layout, name: str, **options: Any) -> Any:
    """Return auto_class.from_pretrained(name, **options), with few copies on the host.

    FSDP broadcasts the weights of rank 0, but transformers 5 reads them on every rank
    (modeling_utils.py does not look at the rank): 8 ranks of an 8B model in fp32 would take 256 GB
    of a host. So the other ranks make the model from its config, in memory that nothing touches.
    Under single, DDP and ZeRO-0 to 2 the weights go straight to the GPU, for DeepSpeed in the dtype
    to which it casts them before it makes its master weights. Two cases are left to transformers:
    ZeRO-3, which splits weights while it loads, and models with new weights, which must be drawn on
    the host whatever the device.

    Args:
        auto_class: of transformers, such as AutoModelForCausalLM.
        name: hub id or folder of the model.
        options: further arguments of from_pretrained; dtype, attn_implementation and
            output_loading_info=True are needed under FSDP and meshes.
    """
    accelerator = layout.accelerator
    if layout.splits_weights:
        return layout.from_pretrained(auto_class, name, **options)
    if not may_broadcast(accelerator, options):
        if stays_whole(accelerator) and not {"id2label", "num_labels"} & options.keys():
            options |= options_of_whole_model(accelerator, options)
        return layout.from_pretrained(auto_class, name, **options)
    skeleton = make_skeleton(auto_class, name, options)
    if can_be_broadcast(skeleton, accelerator):
        return load_on_rank_0(auto_class, accelerator, name, options, skeleton)
    read_on_every_rank(accelerator)
    return auto_class.from_pretrained(name, **options)


def may_broadcast(accelerator: Accelerator, options: Mapping[str, Any]) -> bool:
    """Return whether FSDP is configured to broadcast the weights of rank 0, and can do so."""
    plugin = fsdp_plugin(accelerator)
    if plugin is None or accelerator.num_processes == 1:
        return False
    is_quantized = options.get("quantization_config") is not None
    return plugin.cpu_ram_efficient_loading and not is_quantized


def can_be_broadcast(model: torch.nn.Module, accelerator: Accelerator) -> bool:
    """Return whether FSDP can broadcast all of the model's tensors.

    FSDP1 leaves out ignored modules; accelerate's broadcast for FSDP2 fails for buffers that are
    saved, such as BART's final_logits_bias.
    """
    if fsdp_plugin(accelerator).ignored_modules is not None:
        return False
    saved = model.state_dict()
    has_saved_buffers = any(name in saved for name, _ in model.named_buffers())
    return not (accelerator.is_fsdp2 and has_saved_buffers)


def stays_whole(accelerator: Accelerator) -> bool:
    """Return whether each rank computes with whole weights of its own: not FSDP, not ZeRO-3."""
    zero = accelerator.state.deepspeed_plugin
    if fsdp_plugin(accelerator) is not None:
        return False
    return zero is None or zero.zero_stage < 3


def options_of_whole_model(accelerator: Accelerator, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of from_pretrained that load weights straight to where they are used."""
    found: dict[str, Any] = {}
    dtype = mixed_dtype(accelerator)
    is_quantized = options.get("quantization_config") is not None
    if accelerator.state.deepspeed_plugin and dtype and not is_quantized:
        found["dtype"] = dtype
    if accelerator.device.type == "cuda":
        found["device_map"] = {"": accelerator.device}
    return found


# ---- FSDP: rank 0 reads, the others get its weights in `prepare` ----
@dataclass(frozen=True)
class LoadedOnRank0:
    """What the other ranks need to know about the model that rank 0 has loaded.

    Attributes:
        dtypes: the dtype of each parameter by name: from_pretrained may choose them one by one.
        loading_info: from_pretrained's report of missing weights.
    """

    dtypes: Mapping[str, torch.dtype]
    generation_config: Any
    loading_info: Any


def make_skeleton(auto_class: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return the model of a config: parameters on the meta device, buffers with their values."""
    how = {key: options[key] for key in ("dtype", "attn_implementation")}
    of_config = {}
    for key, value in options.items():
        if key not in ONLY_FOR_LOADING and key not in how:
            of_config[key] = value
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
    skeleton: torch.nn.Module,
) -> Any:
    """Return from_pretrained's result on rank 0; elsewhere the skeleton, in untouched memory.

    The strategy must broadcast the parameters. The loading info is rank 0's everywhere.
    """
    model: Any = skeleton
    loaded = None
    if accelerator.is_main_process:
        model, loading_info = auto_class.from_pretrained(name, **options)
        dtypes = {key: weight.dtype for key, weight in model.named_parameters()}
        generation_config = getattr(model, "generation_config", None)
        loaded = LoadedOnRank0(dtypes, generation_config, loading_info)
    loaded = broadcast_object_list([loaded])[0]
    if not accelerator.is_main_process:
        reserve_memory(model, loaded.dtypes)
        model.eval()
        if loaded.generation_config is not None:
            model.generation_config = loaded.generation_config
    return model, loaded.loading_info


def reserve_memory(model: torch.nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Give the parameters of a skeleton memory that is never written to, and so takes no room.

    They cannot stay on the meta device, since accelerate distinguishes them by their address.

    Args:
        dtypes: the dtypes of parameters by name; other parameters keep theirs.
    """
    # By the old weight, so that tied weights share the new one
    reserved: dict[torch.Tensor, torch.nn.Parameter] = {}
    for prefix, module in model.named_modules():
        for key, weight in module.named_parameters(prefix, recurse=False):
            if weight not in reserved:
                empty = torch.empty(weight.shape, dtype=dtypes.get(key, weight.dtype))
                reserved[weight] = torch.nn.Parameter(empty, weight.requires_grad)
            module._parameters[key.rpartition(".")[2]] = reserved[weight]
