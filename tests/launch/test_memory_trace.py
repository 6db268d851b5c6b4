"""The planner's two ways agree: its closed form, and the real model traced on fake tensors and fake ranks."""

import pytest

from memory_plan import Batch, Plan, closed_form
from memory_trace import simulate
from validate_planner import BASE, config_of, recipe_arguments

SMALL = BASE | {"width": 128, "depth": 2, "vocab": 1000}


def peaks(plan, batch, **others):
    """Bytes at the peak, planned and traced."""
    config = config_of(SMALL | others)
    return sum(closed_form(plan, config, batch)[0].values()), sum(
        simulate(plan, config, batch).values()
    )


SHARDED = {
    "FSDP2": dict(ranks=8, shards=8),
    "FSDP2, bf16": dict(ranks=8, shards=8, mixed_precision="bf16"),
    "FSDP2 that keeps parameters": dict(ranks=8, shards=8, mixed_precision="bf16", reshards=False),
    "FSDP2 in groups": dict(ranks=16, shards=4),
    "FSDP2 on 1,024 ranks": dict(ranks=1024, shards=1024, mixed_precision="bf16"),
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("how", SHARDED.values(), ids=SHARDED)
def test_the_peak_of_a_shard_is_that_of_the_trace(how, tied):
    plan = Plan(recipe_arguments(["--gradient_checkpointing"]), "fsdp2", **how)
    planned, traced = peaks(plan, Batch(1, 64, 32), tied=tied)
    assert planned == pytest.approx(traced, rel=0.02)


TRACED = {
    "mixed precision": (["--gradient_checkpointing"], {}),
    "LoRA on a bf16 base": (["--use_peft", "--dtype", "bfloat16"], {}),
    "QLoRA": (
        ["--use_peft", "--load_in_4bit", "--dtype", "bfloat16", "--bnb_4bit_use_double_quant"],
        {},
    ),
    "int8": (["--use_peft", "--load_in_8bit", "--dtype", "bfloat16"], {}),
    "sharded LoRA": (
        ["--use_peft", "--dtype", "bfloat16"],
        dict(engine="fsdp2", ranks=4, shards=4),
    ),
    "sharded QLoRA": (
        ["--use_peft", "--load_in_4bit", "--dtype", "bfloat16"],
        dict(engine="fsdp2", ranks=4, shards=4),
    ),
}


@pytest.mark.parametrize("flags, how", TRACED.values(), ids=TRACED)
def test_the_peak_in_bf16_is_that_of_the_trace(flags, how):
    plan = Plan(recipe_arguments(flags), mixed_precision="bf16", **how)
    planned, traced = peaks(plan, Batch(2, 256, 512))
    assert planned == pytest.approx(traced, rel=0.02)
