"""The planner's two ways agree: its closed form, and the real model traced on fake tensors and
fake ranks."""

import pytest

from planner.closed_form import closed_form
from planner.plan import Plan
from planner.request import Batch
from planner.trace import simulate
from planner.validation import BASE, config_of, training_arguments

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
TRACED = {
    "mixed precision": ["--gradient_checkpointing"],
    "LoRA on a bf16 base": LORA,
    "QLoRA": [*LORA, "--load_in_4bit", "--bnb_4bit_use_double_quant"],
    "int8": [*LORA, "--load_in_8bit"],
}
TRACED_SHARDED = {"sharded LoRA": LORA, "sharded QLoRA": [*LORA, "--load_in_4bit"]}


@pytest.mark.parametrize("flags", TRACED.values(), ids=TRACED)
def test_the_peak_in_bf16_is_that_of_the_trace(flags):
    plan = Plan(training_arguments(flags), mixed_precision="bf16")
    check_agreement(plan, Batch(2, 256, 512))


@pytest.mark.parametrize("flags", TRACED_SHARDED.values(), ids=TRACED_SHARDED)
def test_the_sharded_peak_in_bf16_is_that_of_the_trace(flags):
    args = training_arguments(flags)
    plan = Plan(args, engine="fsdp2", ranks=4, shards=4, mixed_precision="bf16")
    check_agreement(plan, Batch(2, 256, 512))
