# SPDX-License-Identifier: Apache-2.0
"""What the bare loops, Trainer and SFTTrainer have in common: the model and metrics.jsonl.

`args` is the command line of evidence/benchmark_peers.py.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def load_model(args: argparse.Namespace) -> Any:
    """Return the model as the recipe loads it, with the recipe's adapters if requested."""
    from transformers import AutoModelForCausalLM, set_seed

    set_seed(args.seed)  # adapters start from random numbers
    options = {
        "dtype": args.dtype,
        "attn_implementation": args.attn_implementation,
        "trust_remote_code": False,
    }
    if args.load_in_4bit:
        options["quantization_config"] = quantization(args)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, **options)
    if args.use_peft:
        return with_adapters(model, args)
    return model


def quantization(args: argparse.Namespace) -> Any:
    """Return 4-bit weights as the recipe has them in mixed precision.

    They are stored and multiplied in the compute dtype.
    """
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_quant_storage=args.dtype,
        bnb_4bit_compute_dtype=args.dtype,
        bnb_4bit_use_double_quant=args.bnb_4bit_use_double_quant,
    )


def with_adapters(model: Any, args: argparse.Namespace) -> Any:
    """Return the model with LoRA on all of its linear layers."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        task_type="CAUSAL_LM",
        target_modules="all-linear",
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
    )
    return get_peft_model(model, config)


def write_metrics(folder: Path, tokens: Sequence[int], losses: Mapping[int, float]) -> None:
    """Write metrics.jsonl as the recipe does.

    tokens: of each step, without padding. losses: by the number of the step, from 1.
    """
    lines = []
    seen = 0
    for step, count in enumerate(tokens, 1):
        seen += count
        line = {"step": step, "loss": losses.get(step), "num_input_tokens_seen": seen}
        lines.append(json.dumps(line) + "\n")
    (folder / "metrics.jsonl").write_text("".join(lines))
