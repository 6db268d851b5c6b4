# SPDX-License-Identifier: Apache-2.0
"""What is really in force when a run starts: printed, and written to run.json."""

import contextlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from core.engine import is_compiled
from core.model import is_frozen

RUN = "run.json"
LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "peft", "bitsandbytes", "deepspeed")


def summary_lines(
    accelerator: Accelerator,
    args: Any,
    model: Any,
    strategy: str,
    total_steps: int,
    notes: Mapping[str, str],
) -> dict[str, str]:
    """Return the lines of the summary by their names, in order; `notes` are the recipe's own."""
    total = trained = 0
    for weight in model.parameters():
        total += size_of(weight)
        if weight.requires_grad:
            trained += size_of(weight)
    what = "all weights"
    if trained < total:
        what = f"{trained:,} parameters ({trained / total:.2%} of all)"
    if args.use_peft:
        layers = ", ".join(args.lora_target_modules)
        what = f"LoRA adapters of rank {args.lora_r} on {layers}: {what}"
    rate = f"learning rate {args.learning_rate:g}, {args.lr_scheduler_type}"
    lines = {
        "model": f"{args.model_name_or_path}, {total:,} parameters",
        "trained": what,
        "strategy": f"{strategy}, {accelerator.num_processes} x {accelerator.device.type}",
        "precision": describe_precision(accelerator, args),
        "attention": model.config._attn_implementation,
    }
    lines |= {
        "steps": f"{total_steps:,}, --save_steps {args.save_steps}",
        "optimizer": f"--optim {args.optim}, weight decay {args.weight_decay:g}",
        "schedule": f"{rate}, --warmup_steps {args.warmup_steps:g}",
    }
    if getattr(args, "chat_template", None):
        lines["template"] = args.chat_template
    return lines | dict(notes)


def describe_precision(accelerator: Accelerator, args: Any) -> str:
    """Return what weights and products are in, and how layers are computed."""
    precision = f"weights {args.dtype}, mixed precision {accelerator.mixed_precision}"
    if getattr(args, "load_in_8bit", False):
        precision += ", quantization int8"
    elif getattr(args, "load_in_4bit", False):
        precision += f", quantization {args.bnb_4bit_quant_type}"
    elif getattr(args, "load_in_fp8", False):
        precision += ", quantization float8"
    if is_compiled(accelerator):
        precision += ", compiled"
    if args.gradient_checkpointing != "no":
        precision += f", recomputation {args.gradient_checkpointing}"
    return precision


def size_of(weight: torch.Tensor) -> int:
    """Return the number of elements of a whole weight.

    ZeRO-3 may have split the weight, extras/float8 may have packed it, and bitsandbytes two
    elements to a byte.
    """
    size = getattr(weight, "ds_numel", weight.numel())
    size = getattr(weight, "packed_numel", size)
    if type(weight).__name__ == "Params4bit":
        return size * 2 * weight.element_size()
    return size


def flops_per_token(model: Any, args: Any, lengths: np.ndarray | None) -> float | None:
    """Return the FLOPs of training on a token, None of what is no causal language model.

    As PaLM counts them (arXiv 2204.02311, appendix B): of each weight in a product 2 forward, 2 for
    the gradient of its input, and 2 for its own if it is trained; and those of attention, but only
    over the tokens before. What is computed again does not count, nor does a reference.

    Args:
        lengths: tokens of each row; None of a stream, whose blocks have --max_length.
    """
    if model.get_output_embeddings() is None or model.config.is_encoder_decoder:
        return None
    if lengths is None:
        lengths = np.array([args.max_length])
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None)
    flops = 0.0
    for path, module in model.named_modules():  # A head that shares its weight has it too
        is_unused = path.endswith("original_module") or is_frozen(model, path)
        if is_unused or isinstance(module, torch.nn.Embedding):
            continue
        for weight in module.parameters(recurse=False):
            shape = getattr(weight, "ds_shape", weight.shape)  # of the whole, under ZeRO-3
            size = size_of(weight) if len(shape) > 1 else 0
            if len(shape) == 3 and experts:  # A token meets some of all experts
                size *= experts / shape[0]
            flops += 4 * size
            if weight.requires_grad:
                flops += 2 * size
    heads = getattr(config, "num_attention_heads", None) or 0
    of_head = getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1)
    attended = (lengths**2).sum() / lengths.sum() / 2  # by a token, on average
    return flops + 12 * config.num_hidden_layers * heads * of_head * attended


def write_run_json(args: Any, lines: Mapping[str, str], identity: Mapping[str, Any]) -> None:
    """Write all that makes up a run to OUTPUT_DIR/run.json.

    Args:
        identity: what is compared when the run resumes, beside its arguments.
    """
    versions = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    run = {
        "summary": lines,
        "command": sys.argv,
        "arguments": vars(args),
        **identity,
        "loss_unit": args.LOSS_UNIT,
        "versions": versions,
    }
    Path(args.output_dir, RUN).write_text(json.dumps(run, indent=2))
