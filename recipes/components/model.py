# SPDX-License-Identifier: Apache-2.0
"""The model: a quantized base, adapters, kernels, and what saves memory."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from components import weights
from components.adapter_layers import find_layers_to_skip, reads_no_text
from components.loading import build_without_weights, loading
from components.model_checks import (
    check_adapters,
    check_modules_to_save,
    check_weights_are_read,
    refuse_quantized_base,
)
from core import workarounds
from core.arguments import (
    AdapterArguments,
    CommonArguments,
    DenseModelArguments,
    LigerArguments,
)
from core.engine import Layout, compute_dtype


def load_pretrained(
    auto_class: Any, args: CommonArguments, layout: Layout
) -> "transformers.PreTrainedModel":
    """Return the model of a folder or hub id, quantized if the arguments say so.

    Ends with 64 if it cannot be loaded. With --dry_run it has no weights, only their shapes.

    Args:
        auto_class: one of transformers' AutoModel classes.
    """
    model, report = load_with_report(auto_class, args, layout)
    check_weights_are_read(args, model, report)
    return model


def outline_of(auto_class: Any, args: CommonArguments) -> "transformers.PreTrainedModel":
    """Return the model of a folder or hub id without its weights, which are on the meta device.

    Ends with 64 if there is no such model.
    """
    options = {
        "dtype": args.dtype,
        "attn_implementation": args.attn_implementation,
        "revision": args.model_revision,
        "trust_remote_code": False,
    }
    with loading("model", args.model_name_or_path):
        return weights.make_skeleton(auto_class, args.model_name_or_path, options)


def load_with_report(
    auto_class: Any, args: CommonArguments, layout: Layout, **options: Any
) -> tuple["transformers.PreTrainedModel", Mapping[str, Any]]:
    """Return the model, as `load_pretrained` does, and a report of what its files did not hold.

    Args:
        options: further arguments of from_pretrained, of a model whose head may be new.
    """
    has_new_head = bool(options)
    options = {
        "dtype": args.dtype,
        "attn_implementation": args.attn_implementation,
        "quantization_config": quantization(args, layout.accelerator),
        "revision": args.model_revision,
        "trust_remote_code": False,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # These weights are in the report.
        **options,
    }
    with loading("model", args.model_name_or_path):
        refuse_quantized_base(args, layout.accelerator, has_new_head)
        if args.dry_run:
            return build_without_weights(auto_class, args.model_name_or_path, **options)
        return weights.load_pretrained(auto_class, layout, args.model_name_or_path, **options)


def quantization(
    args: CommonArguments, accelerator: Accelerator, skip_modules: list[str] | None = None
) -> "transformers.BitsAndBytesConfig | None":
    """Return bitsandbytes' config for --load_in_8bit or --load_in_4bit, or None.

    Args:
        skip_modules: regular expressions of modules that stay as they are.
    """
    if not isinstance(args, DenseModelArguments):
        return None
    if args.load_in_8bit:
        return transformers.BitsAndBytesConfig(
            load_in_8bit=True, llm_int8_skip_modules=skip_modules
        )
    if not args.load_in_4bit:
        return None
    # All four are set, since the library's defaults would be fp4, float32 and uint8.
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.bnb_4bit_quant_type,
        bnb_4bit_quant_storage=args.dtype,
        bnb_4bit_compute_dtype=compute_dtype(args.dtype, accelerator),
        bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
        llm_int8_skip_modules=skip_modules,
    )


def set_up_layers(model: "transformers.PreTrainedModel", args: CommonArguments) -> None:
    """Turn on --gradient_checkpointing and --use_liger_kernel, and prepare a quantized base."""
    if args.gradient_checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    workarounds.keep_4bit_weights_as_loaded(model)
    workarounds.keep_frozen_weights_frozen(model)
    for name, weight in model.named_parameters():
        if reads_no_text(model, name):  # Weight decay would change it, and DDP wait for it.
            weight.requires_grad_(False)
    workarounds.name_layers_to_wrap(model)
    if isinstance(args, LigerArguments) and args.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        # Liger's loss stays off: LossInHead computes fewer logits.
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def add_adapters(
    model: torch.nn.Module,
    args: CommonArguments,
    layout: Layout,
    new_modules: Sequence[str] = (),
    **options: Any,
) -> torch.nn.Module:
    """Return the model with LoRA adapters, or with --use_peft off the model as it is.

    Args:
        new_modules: names of modules that are trained whole beside the adapters.
        options: further arguments of peft's LoraConfig, such as task_type.
    """
    if not args.use_peft:
        return model
    check_adapters(model, args.lora_target_modules)
    check_modules_to_save(model, args.modules_to_save)
    if os.path.isdir(args.model_name_or_path):  # peft writes it into adapter_config.json
        vars(model)["name_or_path"] = os.path.abspath(args.model_name_or_path)
    new_modules = [*new_modules, *args.modules_to_save]
    options |= {"modules_to_save": new_modules or None, "revision": args.model_revision}
    options["exclude_modules"] = find_layers_to_skip(model, args.lora_target_modules) or None
    accelerator = layout.accelerator
    with layout.making_adapters(model):
        model = wrap_in_adapters(model, lora_config(args, **options), accelerator)
    keep_running_statistics(model)
    use_dora = isinstance(args, DenseModelArguments) and args.use_dora
    workarounds.leave_casts_to_autocast(model, accelerator, use_dora)
    workarounds.cast_for_zero3(model, accelerator)
    workarounds.wrap_adapters_for_fsdp1(model, accelerator)
    return model


def keep_running_statistics(model: torch.nn.Module) -> None:
    """Have BatchNorm of a frozen base compute as in evaluations: no adapter has its statistics."""

    def stay_as_it_is(mode: bool = True) -> Any:
        """Take the place of `Module.train`, which the training loop calls."""

    for path, module in model.named_modules():
        is_frozen = ".modules_to_save." not in path
        if is_frozen and isinstance(module, torch.nn.modules.batchnorm._NormBase):
            module.eval()
            module.train = stay_as_it_is


def wrap_in_adapters(model: torch.nn.Module, config: Any, accelerator: Accelerator) -> Any:
    """Return the model with peft's adapters and its copies of modules, in the dtypes of training.

    Args:
        config: peft's LoraConfig.
        accelerator: only its mixed_precision and is_fsdp2 are read.
    """
    from peft import get_peft_model

    computes_in_16_bits = accelerator.mixed_precision != "no"
    # Adapters of a 16-bit base become fp32, except where FSDP2 needs one dtype in a unit.
    to_fp32 = computes_in_16_bits or not accelerator.is_fsdp2 or not config.modules_to_save
    model = get_peft_model(model, config, autocast_adapter_dtype=to_fp32)
    if config.modules_to_save and computes_in_16_bits:
        cast_trained_to_fp32(model)
    return model


def cast_trained_to_fp32(model: torch.nn.Module) -> None:
    """Give new modules the dtype of the adapters. A DTensor has its data in another tensor."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad and isinstance(weight, DTensor):
                setattr(module, name, torch.nn.Parameter(weight.detach().float()))
            elif weight.requires_grad:
                weight.data = weight.data.float()


def lora_config(args: AdapterArguments, **options: Any) -> Any:
    """Return peft's LoraConfig of the arguments, and of further options, which override them."""
    from peft import LoraConfig

    known: dict[str, Any] = {
        "r": args.lora_r,
        "lora_alpha": args.lora_alpha,
        "lora_dropout": args.lora_dropout,
        "target_modules": args.lora_target_modules,
    }
    if args.lora_target_modules == ["all-linear"]:
        known["target_modules"] = "all-linear"
    if isinstance(args, DenseModelArguments):
        known["use_rslora"] = args.use_rslora
        known["use_dora"] = args.use_dora
    return LoraConfig(**(known | options))
