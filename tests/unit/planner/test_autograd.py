# SPDX-License-Identifier: Apache-2.0
"""The autograd over sizes: what a graph holds, and when it is freed."""

import pytest

from planner.autograd import FP32, Autograd, Tensor, Weight
from planner.ledger import Ledger

FEATURES = 8
TOKENS = 16
ACTIVATION = TOKENS * FEATURES * FP32  # bytes
MATRIX = FEATURES * FEATURES * FP32


@pytest.fixture
def ledger():
    return Ledger()


def layers(number, trains=True):
    return [Weight(FEATURES * FEATURES, FP32, trains) for _ in range(number)]


def forward(ag, weights, x=None):
    """A chain of matrix products, and the loss of its end."""
    if x is None:
        x = Tensor(TOKENS * FEATURES, FP32, ag.new(TOKENS * FEATURES, FP32))
    for weight in weights:
        x = ag.linear(x, weight, TOKENS)
    return ag.op(1, FP32, [x])


def test_a_storage_is_held_until_nothing_refers_to_it(ledger):
    ag = Autograd(ledger)
    storage = ag.new(10, FP32)
    other = storage
    del storage
    assert ledger.total == 10 * FP32
    del other
    assert ledger.total == 0
    assert ledger.peak == 10 * FP32


def test_memory_is_rounded_up_to_whole_elements(ledger):
    storage = Autograd(ledger).new(2.5, FP32)
    assert storage.size == 3 * FP32


def test_bytes_can_change_their_category(ledger):
    storage = Autograd(ledger).new(1, FP32)
    storage.becomes("gradients")
    assert ledger.held == {"activations": 0, "gradients": FP32}


def test_the_forward_pass_keeps_the_input_of_each_trained_product(ledger):
    weights = layers(3)
    loss = forward(Autograd(ledger), weights)
    # The last of four activations is freed, since only the loss depends on it
    assert ledger.held["activations"] == 3 * ACTIVATION + FP32
    assert loss.node is not None


def test_frozen_weights_keep_nothing(ledger):
    loss = forward(Autograd(ledger), layers(3, trains=False))
    assert loss.node is None
    assert ledger.held["activations"] == FP32


def test_the_backward_pass_leaves_only_gradients_of_weights(ledger):
    ag = Autograd(ledger)
    weights = layers(3)
    ag.backward(forward(ag, weights))
    assert ledger.held == {"activations": 0, "gradients": 3 * MATRIX}
    assert all(weight.gradient is not None for weight in weights)


def test_a_second_gradient_is_added_to_the_first(ledger):
    ag = Autograd(ledger)
    weights = layers(2)
    for _ in range(2):
        ag.backward(forward(ag, weights))
    assert ledger.held["gradients"] == 2 * MATRIX


def test_a_weight_that_is_used_twice_gets_one_gradient(ledger):
    finished = []
    ag = Autograd(ledger, accumulate=lambda weight, gradient: finished.append(weight))
    weight, other = layers(2)
    ag.backward(forward(ag, [weight, other, weight]))
    assert sorted(map(id, finished)) == sorted([id(weight), id(other)])


def test_without_grad_only_two_activations_are_there_at_once(ledger):
    ag = Autograd(ledger)
    ag.no_grad = True
    forward(ag, layers(5))
    assert ledger.peak == 2 * ACTIVATION


def test_a_checkpoint_keeps_only_its_input(ledger):
    ag = Autograd(ledger)
    weights = layers(4)
    x = Tensor(TOKENS * FEATURES, FP32, ag.new(TOKENS * FEATURES, FP32))
    loss = ag.checkpoint(lambda x: forward(ag, weights, x), x)
    del x
    assert ledger.held["activations"] == ACTIVATION + FP32
    ag.backward(loss)
    assert ledger.held == {"activations": 0, "gradients": 4 * MATRIX}


def test_a_checkpoint_does_not_free_what_an_op_holds_by_itself(ledger):
    ag = Autograd(ledger)
    weights = layers(4)

    def segment(x):
        y = ag.linear(x, weights[0], TOKENS)
        z = ag.linear(y, weights[1], TOKENS)
        ag.hold(z, y)
        return forward(ag, weights[2:], z)

    x = Tensor(TOKENS * FEATURES, FP32, ag.new(TOKENS * FEATURES, FP32))
    loss = ag.checkpoint(segment, x)
    del x
    assert ledger.held["activations"] == 2 * ACTIVATION + FP32
    ag.backward(loss)
    assert ledger.held["activations"] == 0


def test_a_checkpoint_gives_the_peak_of_its_segment(ledger):
    """What is computed again is held again, but for one segment at a time."""
    ag = Autograd(ledger)
    x = Tensor(TOKENS * FEATURES, FP32, ag.new(TOKENS * FEATURES, FP32))
    for _ in range(4):
        segment = layers(4)
        x = ag.checkpoint(lambda x, segment=segment: chain(ag, segment, x), x)
    ag.backward(ag.op(1, FP32, [x]))
    whole = 16 * ACTIVATION
    assert ledger.peak < whole


def chain(ag, weights, x):
    for weight in weights:
        x = ag.linear(x, weight, TOKENS)
    return x


def test_autocast_copies_a_trained_weight_once_and_a_frozen_one_at_each_use(ledger):
    ag = Autograd(ledger, autocast_itemsize=2)
    trained = Weight(FEATURES * FEATURES, FP32, True)
    frozen = Weight(FEATURES * FEATURES, FP32, False)
    assert ag.autocast_copy(trained) is ag.autocast_copy(trained)
    assert ag.autocast_copy(frozen) is not ag.autocast_copy(frozen)
    assert ledger.held["working copies"] == MATRIX / 2
    ag.end_autocast()
    assert ledger.held["working copies"] == 0
