# SPDX-License-Identifier: Apache-2.0
"""The closed form: what it counts, and states by published arithmetic."""

import pytest
from transformers import AutoConfig

from planner.closed_form import closed_form, strategy_for
from planner.plan import Plan, plan_of
from planner.request import Batch
from planner_jobs import BASE, config_of, training_arguments

GB = 10**9
SMALL = BASE | {"width": 128, "depth": 2, "vocab": 1000}


def small(**others):
    return config_of(SMALL | others)


def peak(sizes):
    return sum(sizes.values())


def planned_peak(plan, config, batch):
    device, _ = closed_form(plan, config, batch)
    return peak(device)


def test_evaluation_with_larger_batches_is_planned():
    args = training_arguments(["--per_device_eval_batch_size", "64"])
    plan = plan_of(args, {"distributed_type": "NO"}, 1)
    batch = Batch(1, 512, 512)
    training_only = planned_peak(plan, small(), batch)
    args.eval_strategy = "epoch"
    assert planned_peak(plan, small(), batch) > 2 * training_only


def test_zero3_keeps_a_small_embedding_whole():
    """One below DeepSpeed's threshold is never gathered, also not for its backward pass."""
    plan = Plan(training_arguments([]), "zero", 3, ranks=2, shards=2)
    config = small(vocab=500)
    device, _ = closed_form(plan, config, Batch(1, 16, 16))
    embedding = 4 * 500 * 128
    assert 500 * 128 <= 100_000
    assert device["unsharded"] >= embedding


# The paper's 1.9 for stage 3, and 2 bytes more for each gradient, which the recipes add in fp32
STAGES = [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9 + 2 * 7.5 / 64)]


@pytest.mark.parametrize("stage, gigabytes", STAGES)
def test_states_are_those_of_the_zero_paper(stage, gigabytes):
    """7.5 billion parameters on 64 GPUs (arXiv 1910.02054, figure 1)."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=4096,
        intermediate_size=4 * 4096,
        num_hidden_layers=28,
        num_attention_heads=32,
        vocab_size=100,
        tie_word_embeddings=True,
    )
    args = training_arguments([])
    plan = Plan(args, "zero", stage, ranks=64, shards=64, mixed_precision="bf16")
    strategy, _ = strategy_for(plan, config)
    elements = sum(weight.numel for weight in strategy.weights)
    assert elements == pytest.approx(7.5e9, rel=0.003)
    held, _ = strategy.at_rest()
    states = sum(held[name] for name in ("parameters", "master copies", "optimizer"))
    # Before ZeRO-3 gradients come and go
    of_pass = 2 * elements / (64 if stage == 2 else 1)
    states += held.get("gradients", of_pass)
    per_model_of_paper = states * 7.5e9 / elements
    assert per_model_of_paper == pytest.approx(gigabytes * GB, abs=0.05 * GB)


def test_a_checkpoint_in_the_background_takes_a_rank_its_share_of_host_memory():
    batch = Batch(1, 16, 16)
    plan = Plan(training_arguments(["--async_save"]), "fsdp2", ranks=4, shards=4)
    device, host = closed_form(plan, small(), batch)
    strategy, _ = strategy_for(plan, small())
    elements = sum(weight.numel for weight in strategy.weights)
    assert host == {"checkpoint": 12 * elements // 4}
    waiting = Plan(training_arguments([]), "fsdp2", ranks=4, shards=4)
    assert closed_form(waiting, small(), batch) == (device, {})
