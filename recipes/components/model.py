"""The model: a quantized base, adapters, kernels, and what saves memory."""

from typing import Any

import torch
import transformers
from accelerate import Accelerator

from components import upstream
from components.arguments import (
    AdapterArguments,
    CommonArguments,
    LigerArguments,
    LoraVariantArguments,
    QuantizationArguments,
)
from components.loading import build_without_weights, loading
from components.model_checks import check_adapters
from components.strategy import compute_dtype
from components.weights import read_weights


def load_pretrained(
    auto_class: Any, args: CommonArguments, accelerator: Accelerator, **options: Any
) -> Any:
    """Return the model of a folder or hub id, quantized as the arguments ask for.

    Ends with 64 if it cannot be loaded. With --dry_run it has no weights, only their shapes.

    Args:
        auto_class: one of transformers' AutoModel classes.
        options: further arguments of from_pretrained.
    """
    options = {
        "dtype": args.dtype,
        "attn_implementation": args.attn_implementation,
        "quantization_config": quantization(args, accelerator),
        "trust_remote_code": False,
        **options,
    }
    with loading("model", args.model_name_or_path):
        if args.dry_run:
            return build_without_weights(auto_class, args.model_name_or_path, **options)
        return read_weights(auto_class, accelerator, args.model_name_or_path, **options)


def quantization(
    args: CommonArguments, accelerator: Accelerator
) -> "transformers.BitsAndBytesConfig | None":
    """Return bitsandbytes' config for --load_in_8bit or --load_in_4bit, or None."""
    if not isinstance(args, QuantizationArguments):
        return None
    if args.load_in_8bit:
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    if not args.load_in_4bit:
        return None
    # The library's own defaults are fp4, float32 and uint8: always say all four
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=args.bnb_4bit_quant_type,
        bnb_4bit_quant_storage=args.dtype,
        bnb_4bit_compute_dtype=compute_dtype(args.dtype, accelerator),
        bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
    )


def set_up_layers(model: "transformers.PreTrainedModel", args: CommonArguments) -> None:
    """Turn on --gradient_checkpointing and --use_liger_kernel, and prepare a quantized base."""
    if args.gradient_checkpointing:
        upstream.enable_gradient_checkpointing(model)
    if isinstance(args, QuantizationArguments) and args.load_in_8bit:
        upstream.silence_int8_casts()
    upstream.keep_4bit_weights_as_loaded(model)
    if isinstance(args, LigerArguments) and args.use_liger_kernel:
        from transformers.integrations.liger import apply_liger_kernel

        # Not its loss, for which LossInHead reads fewer tokens
        apply_liger_kernel(model, {"fused_linear_cross_entropy": False, "cross_entropy": False})


def add_adapters(
    model: torch.nn.Module, args: CommonArguments, accelerator: Accelerator, **options: Any
) -> torch.nn.Module:
    """Return the model with LoRA adapters if --use_peft asks for them.

    Args:
        options: further arguments of peft's LoraConfig, such as task_type and modules_to_save.
    """
    if not args.use_peft:
        return model
    from peft import get_peft_model

    check_adapters(model, args.lora_target_modules)
    model = get_peft_model(model, lora_config(args, **options))
    use_dora = isinstance(args, LoraVariantArguments) and args.use_dora
    upstream.leave_casts_to_autocast(model, accelerator, use_dora)
    upstream.cast_for_zero3(model, accelerator)
    upstream.wrap_adapters_for_fsdp1(model, accelerator)
    return model


def lora_config(args: AdapterArguments, **options: Any) -> Any:
    """Return peft's LoraConfig of the arguments and of further options."""
    from peft import LoraConfig

    targets: Any = args.lora_target_modules
    if targets == ["all-linear"]:
        targets = "all-linear"
    if isinstance(args, LoraVariantArguments):
        options = {"use_rslora": args.use_rslora, "use_dora": args.use_dora, **options}
    return LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=targets,
        **options,
    )
