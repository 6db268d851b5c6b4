# SPDX-License-Identifier: Apache-2.0
"""The loss of the router is transformers' for one row, and a sum over rows however they are cut."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import mixtral

LAYERS, EXPERTS, TOP_K = 3, 5, 2
ROWS = [
    {"input_ids": np.arange(1, n + 1), "labels": np.arange(1, n + 1), "row": n} for n in (7, 2, 4)
]


def of_one_rank(sums):
    """The sum over the ranks that share rows, of which there is one."""
    return sums


def collate_rows(rows, pad_token_id):
    collate = mixtral.RoutedCollator(pad_token_id=pad_token_id)
    source = SimpleNamespace(__getitems__=lambda numbers: [rows[number] for number in numbers])
    return collate(source, [[number] for number in range(len(rows))])


def logits_of(batch, seed=0):
    """Router logits of each layer that depend only on the token, the same for each batch."""
    table = torch.randn(LAYERS, 100, EXPERTS, generator=torch.Generator().manual_seed(seed))
    ids = batch["inputs"]["input_ids"].flatten()
    return tuple(table[layer, ids].requires_grad_() for layer in range(LAYERS))


def loss_of(rows, seed=0):
    batch = collate_rows(rows, pad_token_id=99)
    return mixtral.router_loss(logits_of(batch, seed), batch["routed"], TOP_K, of_one_rank)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['row']} tokens")
def test_of_one_row_loss_and_gradient_are_those_of_transformers(row):
    batch = collate_rows([row], pad_token_id=99)
    ours, theirs = logits_of(batch), logits_of(batch)
    loss, _ = mixtral.router_loss(ours, batch["routed"], TOP_K, of_one_rank)
    # Weighted with its tokens
    expected = row["row"] * load_balancing_loss_func(theirs, EXPERTS, TOP_K)
    torch.testing.assert_close(loss, expected)
    gradients = torch.autograd.grad(loss, ours)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, theirs))


def test_it_adds_up_however_the_batch_is_cut_and_padding_has_no_part():
    whole, load = loss_of(ROWS)
    for cut in ([[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[], [0, 1, 2]]):
        parts = [loss_of([ROWS[i] for i in part]) for part in cut]
        torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
        assert torch.equal(sum(load for _, load in parts), load)
    batch = collate_rows(ROWS, pad_token_id=99)
    mask = (batch["inputs"]["input_ids"] != 99).long()
    # Why it is not used as it is
    of_batch = load_balancing_loss_func(logits_of(batch), EXPERTS, TOP_K, mask)
    assert abs(of_batch - whole / 13) > 0.01
    assert load.sum(1).tolist() == [13 * TOP_K] * LAYERS
