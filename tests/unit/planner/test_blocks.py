# SPDX-License-Identifier: Apache-2.0
"""What a layer of Llama keeps for the backward pass: the formulas of planner/blocks.py."""

from dataclasses import replace

import pytest

from planner.autograd import Autograd
from planner.blocks import Forward
from planner.closed_form import strategy_for
from planner.ledger import Ledger
from planner.plan import Plan
from planner.ranks import Replica
from planner.request import Batch
from planner_jobs import BASE, config_of, training_arguments

CELL = BASE | {"width": 64, "vocab": 100}
HIDDEN = CELL["width"]
HEADS = CELL["heads"]
KEYS = HIDDEN * CELL["kv_heads"] // HEADS  # features of all keys
MLP = int(HIDDEN * CELL["ratio"])
BATCH = Batch(2, 32, 64)
TOKENS = 64


def kept(depth, flags, batch=BATCH, **how):
    """Bytes of activations that a forward pass leaves for the backward pass."""
    plan = Plan(training_arguments(flags), **how)
    weights, decoder = strategy_for(plan, config_of(CELL | {"depth": depth}))
    ledger = Ledger()
    autograd = Autograd(ledger)
    strategy = Replica(plan, weights.weights, {})
    strategy.begin(autograd)
    run = Forward(autograd, decoder, batch, plan, strategy.around).run()
    size = ledger.held["activations"]
    del run
    return size


def kept_per_layer(flags, batch=BATCH, **how):
    return kept(3, flags, batch, **how) - kept(2, flags, batch, **how)


FORMULAS = {
    "fp32": ([], 4 * (8 * HIDDEN + 2 * KEYS + 4 * MLP + HEADS + 2)),
    "bf16": (
        ["--dtype", "bfloat16"],
        20 * HIDDEN + 4 * KEYS + 8 * MLP + 4 * HEADS + 8,
    ),
    "checkpointed": (["--gradient_checkpointing"], 4 * HIDDEN),
    "checkpointed, bf16": (["--gradient_checkpointing", "--dtype", "bfloat16"], 2 * HIDDEN),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_layer_keeps_as_many_bytes_of_a_token_as_the_formula_says(name):
    flags, expected = FORMULAS[name]
    assert kept_per_layer(flags) / TOKENS == expected


def test_packed_rows_take_a_mask_in_each_layer():
    packed = replace(BATCH, packed=True)
    assert kept_per_layer([], packed) > kept_per_layer([])


def test_packed_rows_take_no_mask_in_a_layer_where_ranks_share_them():
    """Under sequence parallelism attention computes one row after another."""
    packed = replace(BATCH, packed=True)
    assert kept_per_layer([], packed, ranks=2, sp=2) == kept_per_layer([], ranks=2, sp=2)


def test_a_mask_of_the_own_tokens_waits_for_recomputed_layers_that_are_not_given_it():
    """transformers makes it under sequence parallelism, and DeepSpeed drops it in each layer."""
    flags = ["--gradient_checkpointing"]
    alone = kept(2, flags, ranks=2, sp=2)
    together = kept(2, flags, replace(BATCH, packed=True), ranks=2, sp=2)
    assert together - alone == BATCH.sequences * BATCH.length**2
