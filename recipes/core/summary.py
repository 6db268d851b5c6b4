# SPDX-License-Identifier: Apache-2.0
"""What is really in force when a run starts: printed, and written to run.json."""

import contextlib
import json
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

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
        what = f"LoRA adapters, {what}"
    precision = f"weights {args.dtype}, mixed precision {accelerator.mixed_precision}"
    if getattr(args, "load_in_8bit", False):
        precision += ", quantization int8"
    elif getattr(args, "load_in_4bit", False):
        precision += f", quantization {args.bnb_4bit_quant_type}"
    rate = f"learning rate {args.learning_rate:g}, {args.lr_scheduler_type}"
    lines = {
        "model": f"{args.model_name_or_path}, {total:,} parameters",
        "trained": what,
        "strategy": f"{strategy}, {accelerator.num_processes} x {accelerator.device.type}",
        "precision": precision,
        "attention": model.config._attn_implementation,
        "steps": f"{total_steps:,}, --save_steps {args.save_steps}",
        "schedule": f"{rate}, --warmup_steps {args.warmup_steps:g}",
    }
    return lines | dict(notes)


def size_of(weight: torch.Tensor) -> int:
    """Return the number of elements of a whole weight.

    ZeRO-3 may have split the weight, or bitsandbytes may have packed it, two elements to a byte.
    """
    size = getattr(weight, "ds_numel", weight.numel())
    if type(weight).__name__ == "Params4bit":
        return size * 2 * weight.element_size()
    return size


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
