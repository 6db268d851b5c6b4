# SPDX-License-Identifier: Apache-2.0
"""What strangers reported of training: noise where there should be none, and lost precision.

Every model is tiny and made here, and every run takes one or two steps.
"""

import json
import math
import os
import sys

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from jobs import RECIPES
from launching import (
    CONFIGS,
    RECIPE,
    REPO,
    accelerate_launch,
    data_of,
    read_metrics,
    rehearse,
    run,
)

DPO = REPO / "recipes" / "llama_dpo.py"
FAST = ["--logging_steps", 1, "--eval_strategy", "no"]


# ---- DPO: the reference is the model before training ----
# Settings of families beside those of `shape`, with the rates that the family knows
FAMILIES = {
    "biogpt": {"layerdrop": 0.3, "activation_dropout": 0.3},
    "bloom": {"hidden_dropout": 0.3},
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3, "parallel_attn": False},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "gpt_bigcode": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "gpt_neo": {
        "attention_dropout": 0.3,
        "resid_dropout": 0.3,
        "attention_types": [[["global", "local"], 1]],
        "num_layers": 2,
        "num_heads": 4,
    },
    "llama": {"attention_dropout": 0.3},
    "mixtral": {"router_jitter_noise": 0.3, "num_local_experts": 4, "num_key_value_heads": 2},
    "opt": {"dropout": 0.3, "layerdrop": 0.3, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {"attention_dropout": 0.3, "hidden_dropout": 0.3},
    "phimoe": {
        "router_jitter_noise": 0.3,
        "input_jitter_noise": 0.3,
        "num_local_experts": 4,
        "num_key_value_heads": 2,
    },
    "seed_oss": {"residual_dropout": 0.3, "num_key_value_heads": 2, "head_dim": 16},
    "starcoder2": {
        "residual_dropout": 0.3,
        "embedding_dropout": 0.3,
        "attention_dropout": 0.3,
        "num_key_value_heads": 2,
    },
    "xglm": {"dropout": 0.3, "layerdrop": 0.3, "activation_dropout": 0.3, "ffn_dim": 128},
}
ADAPTERS = ["--use_peft", "--lora_target_modules", "all-linear"]


@pytest.fixture(scope="module")
def pairs(once):
    def write(folder):
        folder.mkdir()
        rows = [
            {"prompt": f"Say {i}.", "chosen": f"It is {i}.", "rejected": f"No, {i + 3}!"}
            for i in range(4)
        ]
        (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    return once("wild_pairs", write) / "pairs.jsonl"


@pytest.fixture(scope="module")
def noisy(once, tiny_of):
    """A function from a family to the folder of a tiny model of it that drops much in training."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_of("llama_dpo") / "model")
    shape = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": 256,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.1,
    }

    def make(family):
        def write(folder):
            torch.manual_seed(0)
            config = AutoConfig.for_model(family, **shape | FAMILIES[family])
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            tokenizer.save_pretrained(folder)

        return once(f"wild_{family}", write)

    return make


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        *((family, []) for family in FAMILIES),
        # PEFT fails in the router of phimoe, which returns several tensors
        *((family, ADAPTERS) for family in FAMILIES if family != "phimoe"),
        ("opt", ["--gradient_checkpointing"]),
        ("starcoder2", ["--gradient_checkpointing", *ADAPTERS, "--lora_dropout", "0.3"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value[:1]) or "whole",
)
def test_before_the_first_update_the_model_is_its_reference(family, flags, noisy, pairs, tmp_path):
    base = noisy(family)
    command = ["--model_name_or_path", base, "--dataset_name", pairs, *FAST, *flags]
    command += ["--max_steps", 1, "--per_device_train_batch_size", 4, "--output_dir", tmp_path]
    done = run(sys.executable, DPO, *command)
    assert done.returncode == 0, done.output[-3000:]
    ((first,), _) = read_metrics(tmp_path)
    # The last digit of log-probabilities around -100 in fp32 is 1e-5, and beta is 0.1
    assert first["loss"] == pytest.approx(math.log(2), abs=2e-5)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert first[name] == pytest.approx(0, abs=2e-5), name
    if "--use_peft" not in flags:  # Whoever trains the result gets the rates of its base
        given, kept = (json.loads((path / "config.json").read_text()) for path in (base, tmp_path))
        assert {key: kept.get(key) for key in FAMILIES[family]} == FAMILIES[family]
        assert kept.keys() == given.keys()


# ---- fp16 without a GPU ----
def check_refusal(done):
    errors = [line for line in done.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "fp16 needs a GPU" in errors[0], done.output[-2000:]
    assert "Loading weights" not in done.output and "tokenizing" not in done.output.lower()


@pytest.mark.parametrize("recipe", RECIPES)
def test_fp16_without_a_GPU_is_refused_by_every_recipe(recipe, tiny_of, tmp_path):
    environment = os.environ | {"ACCELERATE_MIXED_PRECISION": "fp16", "CUDA_VISIBLE_DEVICES": ""}
    script = REPO / "recipes" / f"{recipe}.py"
    command = [*data_of(tiny_of(recipe)), "--max_steps", 1, "--output_dir", tmp_path / "run"]
    done = run(sys.executable, script, *command, "--dry_run", env=environment)
    assert done.returncode == 64 and "Traceback" not in done.output
    check_refusal(done)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_fp16_of_the_launcher_and_of_a_YAML_is_refused_too(tiny, tmp_path):
    command = [RECIPE, *data_of(tiny), "--max_steps", 1, "--output_dir", tmp_path / "run"]
    config = CONFIGS / "single.yaml"
    done = accelerate_launch(
        "--quiet",
        *["--config_file", config, "--mixed_precision", "fp16", *command],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode != 0  # the launcher's own
    check_refusal(done)
    content = yaml.safe_load((CONFIGS / "ddp.yaml").read_text()) | {"mixed_precision": "fp16"}
    config = tmp_path / "ddp.yaml"
    config.write_text(yaml.safe_dump(content))
    words = ["--device", "cpu", "--mixed_precision", "fp16", "--config_file", config]
    done = run(sys.executable, REPO / "scripts" / "rehearse.py", *words, *command)
    assert done.returncode == 64 and "fp16 needs a GPU" in done.output, done.output[-2000:]


# ---- The loss in pieces under FSDP2 in bf16 ----
def test_the_gradient_of_a_head_in_pieces_is_added_up_in_fp32(tiny, tmp_path):
    """A gradient of bf16 pieces that is added up in bf16 has a norm that is off by 1e-3."""
    norms = {}
    for mib in (0.001, 256):  # the logits of one token at a time, and of all at once
        folder = tmp_path / str(mib)
        flags = ["--max_steps", 1, "--max_logits_mib", mib, *FAST, "--output_dir", folder]
        flags += ["--per_device_train_batch_size", 16]
        done = rehearse("fsdp2_full_shard", *data_of(tiny), *flags, mixed_precision="bf16")
        assert done.returncode == 0, done.output[-3000:]
        ((step,), _) = read_metrics(folder)
        norms[mib] = step["grad_norm"]
    # Pieces round their products as one product does, and their sum is rounded once: 1e-5 was seen
    assert norms[0.001] == pytest.approx(norms[256], rel=1e-4)
