# SPDX-License-Identifier: Apache-2.0
"""What is caught of a weight is what autograd computes, whatever engines make of it."""

import torch

from components.watched_weight import WatchedWeight


def test_a_gradient_is_caught_before_the_hooks_of_engines():
    layer = torch.nn.Linear(2, 1, bias=False)
    layer.weight.register_hook(lambda gradient: gradient / 8)
    watched = WatchedWeight(layer, "weight")
    watched.factor = 2.0
    layer(torch.tensor([[3.0, 5.0]])).sum().mul(2).backward()
    assert watched.take().tolist() == [[3.0, 5.0]]
    assert layer.weight.grad.tolist() == [[0.75, 1.25]]
    watched.stop()
    assert len(layer.weight._backward_hooks) == 1  # the engine's
