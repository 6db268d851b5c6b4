# SPDX-License-Identifier: Apache-2.0
"""What FSDP holds around a layer: the table of planner/fsdp.py."""

import pytest

from planner.autograd import Autograd
from planner.blocks import TAIL, Forward
from planner.closed_form import strategy_for
from planner.decoder import Layer
from planner.ledger import Ledger
from planner.plan import Plan
from planner.request import Batch
from planner_jobs import BASE, config_of, training_arguments

RANKS = 4
# Layers next to which embedding and head are small
CELL = BASE | {"width": 64, "depth": 6, "vocab": 8}
BATCH = Batch(1, 8, 8)


class Watch(Ledger):
    """A ledger that notes the most that was gathered or on its way at once, in bytes."""

    most = 0

    def add(self, category, size):
        super().add(category, size)
        gathered = self.held.get("unsharded", 0) + self.held.get("communication", 0)
        self.most = max(self.most, gathered)


def most_around_layers(plan):
    """(bytes of a layer's parameters, of its gradients, at most in the forward pass, and in the
    backward pass), without what FSDP1's root takes."""
    strategy, decoder = strategy_for(plan, config_of(CELL))
    ledger = Watch()
    autograd = Autograd(ledger, plan.autocast_itemsize)
    strategy.begin(autograd)
    strategy.begin_pass(is_last=True)
    run = Forward(autograd, decoder, BATCH, plan, strategy.around).run()
    strategy.end_forward()
    forward = ledger.most
    ledger.most = 0
    autograd.backward(run.loss)
    root = strategy.units[TAIL].gathered if plan.engine == "fsdp1" else 0
    unit = next(unit for part, unit in strategy.units.items() if isinstance(part, Layer))
    return unit.gathered, unit.reduced, forward - root, ledger.most - root


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_fsdp2_holds_three_layers_and_a_buffer_of_gradients(precision):
    plan = Plan(
        training_arguments([]), "fsdp2", ranks=RANKS, shards=RANKS, mixed_precision=precision
    )
    parameters, gradients, forward, backward = most_around_layers(plan)
    assert forward == 3 * parameters
    assert backward == 3 * parameters + gradients


@pytest.mark.parametrize("prefetches", [False, True])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_fsdp1_holds_one_layer_and_its_gradients_twice(precision, prefetches):
    plan = Plan(
        training_arguments([]),
        "fsdp1",
        ranks=RANKS,
        shards=RANKS,
        mixed_precision=precision,
        prefetches=prefetches,
    )
    parameters, gradients, forward, backward = most_around_layers(plan)
    cast_shards = parameters / RANKS if precision == "bf16" else 0
    assert forward == parameters + cast_shards
    most = max(3 * parameters, parameters + gradients + gradients / RANKS)
    if prefetches:
        most += parameters
    # The root's gradients wait for the end of the pass
    assert backward == pytest.approx(most, rel=0.02)
