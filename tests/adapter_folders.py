# SPDX-License-Identifier: Apache-2.0
"""Folders of adapters as the recipes write them, but with random weights in the place of training.

Training moves few weights much; random ones move all of them, so that no error hides behind a zero.
"""

import json
import shutil
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from core.weights import fingerprint_of_weights
from tiny import makers

SMALL = (
    "--hidden_size 64 --num_hidden_layers 2 --num_attention_heads 2 --num_key_value_heads 2 "
    "--intermediate_size 128 --max_position_embeddings 128 --num_train_rows 64 --num_test_rows 60"
).split()
ATTENTION = ["q_proj", "v_proj"]
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def make_base(folder, recipe="llama", *words, shard=None):
    """Make a small base with rows, in several files if `shard` is the largest size of one."""
    makers.make(recipe, folder, [*SMALL, *words])
    if shard is not None:
        split(folder / "model", shard)
    return folder


def split(model, shard):
    """Write the weights of a folder into files of at most this size."""
    loaded = AutoModelForCausalLM.from_pretrained(model)
    (model / "model.safetensors").unlink()
    loaded.save_pretrained(model, max_shard_size=shard)
    assert (model / "model.safetensors.index.json").is_file()


def write_adapters(folder, base, arguments=None, seed=0, scale=0.1, **options):
    """Write random adapters for base/model, and a run.json with further arguments of its run."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(base / "model")
    options = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, **options}
    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    for name, weight in wrapped.named_parameters():
        if not weight.requires_grad:
            continue
        if "magnitude" in name:
            weight.data *= 1 + scale * torch.rand_like(weight)
        else:
            weight.data = weight.data + scale * torch.randn_like(weight)
    wrapped.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (base / "model" / name).is_file():
            shutil.copyfile(base / "model" / name, folder / name)
    of_run = {
        "model_name_or_path": str(base / "model"),
        "dtype": "float32",
        "dataset_name": str(base / "data" / "train.jsonl"),
        "eval_dataset_name": str(base / "data" / "test.jsonl"),
        "columns": [],
    }
    run = {
        "arguments": of_run | (arguments or {}),
        "base_weights": fingerprint_of_weights(str(base / "model"), "main"),
    }
    (folder / "run.json").write_text(json.dumps(run))
    return Path(folder)
