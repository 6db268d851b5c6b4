# SPDX-License-Identifier: Apache-2.0
"""What strangers reported of training: noise where there should be none, and lost precision.

Every model is tiny and made here, and every run takes one or two steps.
"""

import math
import shutil

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from launching import data_of, edit_json, read_json, read_metrics, recipe, rehearse, write_rows

FAST = ["--logging_steps", 1, "--eval_strategy", "no"]


# ---- DPO: the reference is the model before training ----
# One family for each way to say and to apply a rate: settings beside those of `shape`
FAMILIES = {
    "falcon": {"hidden_dropout": 0.3, "attention_dropout": 0.3, "parallel_attn": False},
    "gpt2": {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3},
    "mixtral": {"router_jitter_noise": 0.3, "num_local_experts": 4, "num_key_value_heads": 2},
    "opt": {"dropout": 0.3, "layerdrop": 0.3, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "starcoder2": {
        "residual_dropout": 0.3,
        "embedding_dropout": 0.3,
        "attention_dropout": 0.3,
        "num_key_value_heads": 2,
    },
}
ADAPTERS = ["--use_peft", "--lora_target_modules", "all-linear", "--lora_dropout", "0.3"]


@pytest.fixture(scope="module")
def pairs(once):
    rows = [
        {"prompt": f"Say {i}.", "chosen": f"It is {i}.", "rejected": f"No, {i + 3}!"}
        for i in range(4)
    ]
    make = lambda folder: write_rows(folder / "pairs.jsonl", rows)  # noqa: E731
    return once("wild_pairs", make) / "pairs.jsonl"


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
        ("falcon", []),
        ("gpt2", ADAPTERS),
        ("mixtral", []),
        ("opt", ["--gradient_checkpointing"]),
        ("starcoder2", ["--gradient_checkpointing", *ADAPTERS]),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value[:1]) or "whole",
)
def test_before_the_first_update_the_model_is_its_reference(family, flags, noisy, pairs, tmp_path):
    base = noisy(family)
    command = ["--model_name_or_path", base, "--dataset_name", pairs, *FAST, *flags]
    command += ["--max_steps", 1, "--per_device_train_batch_size", 4, "--output_dir", tmp_path]
    recipe(*command, name="llama_dpo", code=0)
    ((first,), _) = read_metrics(tmp_path)
    # The last digit of log-probabilities around -100 in fp32 is 1e-5, and beta is 0.1
    assert first["loss"] == pytest.approx(math.log(2), abs=2e-5)
    for name in ("rewards/chosen", "rewards/rejected", "rewards/margins"):
        assert first[name] == pytest.approx(0, abs=2e-5), name
    if "--use_peft" not in flags:  # Whoever trains the result gets the rates of its base
        given, kept = (read_json(path / "config.json") for path in (base, tmp_path))
        assert {key: kept.get(key) for key in FAMILIES[family]} == FAMILIES[family]
        assert kept.keys() == given.keys()


# ---- The loss in pieces under FSDP2 in bf16 ----
def test_the_gradient_of_a_head_in_pieces_is_added_up_in_fp32(tiny, tmp_path):
    """A gradient of bf16 pieces that is added up in bf16 has a norm that is off by 1e-3."""
    norms = {}
    for mib in (0.001, 256):  # the logits of one token at a time, and of all at once
        folder = tmp_path / str(mib)
        flags = ["--max_steps", 1, "--max_logits_mib", mib, *FAST, "--output_dir", folder]
        flags += ["--per_device_train_batch_size", 4]
        rehearse("fsdp2_full_shard", *data_of(tiny), *flags, mixed_precision="bf16", code=0)
        ((step,), _) = read_metrics(folder)
        norms[mib] = step["grad_norm"]
    # Pieces round their products as one product does, and their sum is rounded once: 1e-5 was seen
    assert norms[0.001] == pytest.approx(norms[256], rel=1e-4)


# ---- Tokenizers ----
def test_the_side_of_padding_changes_no_loss_and_stays_that_of_the_base(tiny_of, tmp_path):
    """Training pads on the right. What serves the model must not."""
    losses = []
    for side in ("left", "right"):
        base = shutil.copytree(tiny_of("bert") / "model", tmp_path / side)
        edit_json(base / "tokenizer_config.json", padding_side=side)
        out = tmp_path / f"out_{side}"
        words = ["--model_name_or_path", base, "--max_steps", 1, "--output_dir", out]
        rows = tiny_of("bert") / "data" / "test.jsonl"
        recipe(*words, "--dataset_name", rows, name="bert", code=0)
        losses.append(read_metrics(out)[0][0]["loss"])
        assert read_json(out / "tokenizer_config.json")["padding_side"] == side
    assert losses[0] == losses[1]
