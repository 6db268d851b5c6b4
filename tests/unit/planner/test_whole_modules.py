# SPDX-License-Identifier: Apache-2.0
"""What a rank holds of modules that are trained whole beside adapters (--modules_to_save).

tests/unit/planner/test_ranks.py compares the peaks with measured ones,
tests/launch/test_planner_states.py what is held at rest with live tensors.
"""

import pytest

from planner.closed_form import strategy_for
from planner.decoder import Layer
from planner.plan import Plan
from planner_jobs import BASE, config_of, training_arguments

WIDTH = 128
VOCABULARY = 4000
RANKS = 4
CONFIG = config_of(BASE | {"width": WIDTH, "depth": 2, "vocab": VOCABULARY})
MATRIX = WIDTH * VOCABULARY  # elements of the embedding, and of the head
WHOLE = ["--use_peft", "--dtype", "bfloat16", "--modules_to_save", "lm_head", "embed_tokens"]
SHARDED = {"ranks": RANKS, "shards": RANKS}


def strategy_under(engine="single", flags=WHOLE, **how):
    strategy, _ = strategy_for(Plan(training_arguments(flags), engine, **how), CONFIG)
    return strategy


# (engine and what else, bytes of an element of a copy, of an element of an adapter)
PRECISIONS = {
    "one process": ({"engine": "single"}, 2, 4),
    "one process, autocast": ({"engine": "single", "mixed_precision": "bf16"}, 4, 4),
    "FSDP2": ({"engine": "fsdp2", **SHARDED}, 2, 2),
    "FSDP2, bf16": ({"engine": "fsdp2", "mixed_precision": "bf16", **SHARDED}, 4, 4),
    "FSDP1": ({"engine": "fsdp1", **SHARDED}, 2, 4),
    "FSDP1, bf16": ({"engine": "fsdp1", "mixed_precision": "bf16", **SHARDED}, 4, 4),
}


@pytest.mark.parametrize("how, of_copy, of_adapter", PRECISIONS.values(), ids=PRECISIONS)
def test_copies_have_the_precision_that_the_recipes_give_them(how, of_copy, of_adapter):
    strategy = strategy_under(**how)
    shards = how.get("shards", 1)
    device, _ = strategy.at_rest()
    adapters = sum(w.numel for w in strategy.trained if w.category == "adapters")
    assert device["whole modules"] == 2 * MATRIX * of_copy / shards
    assert device["adapters"] == pytest.approx(adapters * of_adapter / shards, rel=0.01)
    states = 2 * (2 * MATRIX * of_copy + adapters * of_adapter) / shards
    assert device["optimizer"] == pytest.approx(states, rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_has_master_copies_of_what_trains_only(stage):
    strategy = strategy_under(
        "zero", stage=stage, mixed_precision="bf16", ranks=RANKS, shards=RANKS
    )
    device, _ = strategy.at_rest()
    trained = sum(weight.numel for weight in strategy.trained)
    parts = RANKS if stage else 1
    assert trained > 2 * MATRIX
    assert device["master copies"] == pytest.approx(4 * trained / parts, rel=0.001)
    copies = 2 * 2 * MATRIX / (RANKS if stage == 3 else 1)
    assert device["whole modules"] == copies


def test_the_originals_stay_frozen_beside_the_copies():
    without = [flag for flag in WHOLE if flag not in ("--modules_to_save", *WHOLE[-2:])]
    plain, _ = strategy_under(flags=without).at_rest()
    beside, _ = strategy_under().at_rest()
    assert beside["parameters"] == plain["parameters"]


def test_fsdp1_gathers_each_module_that_trains_by_itself():
    strategy = strategy_under("fsdp1", mixed_precision="bf16", **SHARDED)
    for weight in strategy.trained:
        assert strategy.units[weight].gathered == 2 * weight.numel
    layers = [unit for part, unit in strategy.units.items() if isinstance(part, Layer)]
    assert len(layers) == 2
    assert not any(unit.trained for unit in layers)


def test_fsdp2_gathers_an_original_with_its_copy():
    strategy = strategy_under("fsdp2", mixed_precision="bf16", **SHARDED)
    assert strategy.units["embedding"].gathered == 2 * 2 * MATRIX
    assert strategy.units["tail"].gathered == 2 * (2 * MATRIX + WIDTH)


def test_zero3_gathers_a_copy_and_never_its_original():
    strategy = strategy_under("zero", stage=3, mixed_precision="bf16", **SHARDED)
    gathered = {weight for weights in strategy.uses_of_parts for weight in weights}
    of_vocabulary = [weight for weight in strategy.weights if weight.numel == MATRIX]
    assert len(of_vocabulary) == 4
    assert {weight for weight in of_vocabulary if weight in gathered} == {
        weight for weight in of_vocabulary if weight.trains
    }
