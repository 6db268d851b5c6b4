# SPDX-License-Identifier: Apache-2.0
"""The planner's closed form gives the peak that torch's own trackers see.

They track real tensors of one process, or the real model on fake tensors and fake ranks.
"""

import pytest

from measured.validation import BASE, config_of, training_arguments
from planner.closed_form import closed_form
from planner.plan import Plan
from planner.request import Batch
from planner.trace import measure, simulate

SMALL = BASE | {"width": 128, "depth": 2, "vocab": 1000}


def check_agreement(plan, batch, **others):
    """The planned peak is within 2 % of the traced one."""
    config = config_of(SMALL | others)
    device, _ = closed_form(plan, config, batch)
    planned = sum(device.values())
    traced = sum(simulate(plan, config, batch).values())
    assert planned == pytest.approx(traced, rel=0.02)


SHARDED = {
    "FSDP2": {"ranks": 8, "shards": 8},
    "FSDP2, bf16": {"ranks": 8, "shards": 8, "mixed_precision": "bf16"},
    "FSDP2 that keeps parameters": {
        "ranks": 8,
        "shards": 8,
        "mixed_precision": "bf16",
        "reshards": False,
    },
    "FSDP2 in groups": {"ranks": 16, "shards": 4},
    "FSDP2 on 1,024 ranks": {"ranks": 1024, "shards": 1024, "mixed_precision": "bf16"},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", SHARDED.values(), ids=SHARDED)
def test_the_peak_of_a_shard_is_that_of_the_trace(how, tied):
    plan = Plan(training_arguments(["--gradient_checkpointing"]), "fsdp2", **how)
    check_agreement(plan, Batch(1, 64, 32), tied=tied)


LORA = ["--use_peft", "--dtype", "bfloat16"]
WHOLE = ["--modules_to_save", "lm_head", "embed_tokens", "norm"]
TRACED = {
    "mixed precision": ["--gradient_checkpointing"],
    "LoRA on a bf16 base": LORA,
    "QLoRA": [*LORA, "--load_in_4bit", "--bnb_4bit_use_double_quant"],
    "int8": [*LORA, "--load_in_8bit"],
    "int8, checkpointed": [*LORA, "--load_in_8bit", "--gradient_checkpointing"],
    "LoRA and whole modules": [*LORA, *WHOLE],
    "QLoRA and whole modules": [*LORA, "--load_in_4bit", *WHOLE],
    "int8 and whole modules": [*LORA, "--load_in_8bit", *WHOLE],
}
TRACED_SHARDED = {
    "sharded LoRA": LORA,
    "sharded QLoRA": [*LORA, "--load_in_4bit"],
    "sharded LoRA and whole modules": [*LORA, *WHOLE],
    "sharded QLoRA and whole modules": [*LORA, "--load_in_4bit", *WHOLE],
}


@pytest.mark.parametrize("flags", TRACED.values(), ids=TRACED)
def test_the_peak_in_bf16_is_that_of_the_trace(flags):
    plan = Plan(training_arguments(flags), mixed_precision="bf16")
    check_agreement(plan, Batch(2, 256, 512))


@pytest.mark.parametrize("flags", TRACED_SHARDED.values(), ids=TRACED_SHARDED)
def test_the_sharded_peak_in_bf16_is_that_of_the_trace(flags):
    args = training_arguments(flags)
    plan = Plan(args, engine="fsdp2", ranks=4, shards=4, mixed_precision="bf16")
    check_agreement(plan, Batch(2, 256, 512))


def test_whole_modules_have_the_precision_of_a_sharded_base_without_mixed_precision():
    args = training_arguments([*LORA, "--modules_to_save", "mlp", "norm"])
    plan = Plan(args, engine="fsdp2", ranks=4, shards=4)
    check_agreement(plan, Batch(2, 256, 512))


def planned_peak(plan, config, batch):
    device, _ = closed_form(plan, config, batch)
    return sum(device.values())


REAL = {
    "plain": [],
    "checkpointed": ["--gradient_checkpointing"],
    "eager attention": ["--attn_implementation", "eager"],
    "packed": ["--packing"],
    "LoRA": ["--use_peft"],
    "whole modules": ["--use_peft", *WHOLE],
    "whole layers of attention": ["--use_peft", "--modules_to_save", "self_attn"],
    "loss in pieces": ["--max_logits_mib", "0.5"],
    "accumulation": ["--gradient_accumulation_steps", "2"],
}


@pytest.mark.parametrize("flags", REAL.values(), ids=REAL)
def test_the_peak_is_that_of_real_tensors(flags):
    plan = Plan(training_arguments(flags))
    batch = Batch(2, 256, 512, packed="--packing" in flags)
    measured = sum(measure(plan, config_of(SMALL), batch).values())
    assert planned_peak(plan, config_of(SMALL), batch) == pytest.approx(measured, rel=0.01)


HEADS = {"full": [], "LoRA": ["--use_peft"], "LoRA, trained head": ["--use_peft", *WHOLE]}


@pytest.mark.parametrize("flags", HEADS.values(), ids=HEADS)
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_pieces_of_a_large_head_are_counted(precision, flags):
    """The vocabulary is so large that the peak is in the loss."""
    args = training_arguments(["--max_logits_mib", "2", *flags])
    plan = Plan(args, mixed_precision=precision)
    config = config_of(SMALL | {"vocab": 20000})
    batch = Batch(2, 64, 128)
    measured = sum(measure(plan, config, batch).values())
    assert planned_peak(plan, config, batch) == pytest.approx(measured, rel=0.002)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshards", [True, False])
def test_a_shard_of_a_head_in_pieces_is_that_of_the_trace(reshards, tied):
    """FSDP2 changes the type of the head's layer, which the loss in pieces has to know."""
    args = training_arguments(["--max_logits_mib", "1"])
    plan = Plan(args, "fsdp2", ranks=8, shards=8, mixed_precision="bf16", reshards=reshards)
    check_agreement(plan, Batch(2, 128, 200), vocab=8000, tied=tied)


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_rows_longer_than_a_window_get_masks(family):
    config = config_of(SMALL | {"family": family})
    config.sliding_window = 128
    config.use_sliding_window = True
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    plan = Plan(training_arguments([]))
    batch = Batch(1, 512, 512)
    traced = sum(simulate(plan, config, batch).values())
    assert planned_peak(plan, config, batch) == pytest.approx(traced, rel=0.02)
