# SPDX-License-Identifier: Apache-2.0
"""What a rank's autograd keeps: how it is counted, and the share of a rank that shares rows."""

import json

import pytest
import torch

from launching import REPO
from measured import activations
from measured.activation_probe import SavedTensors
from measured.rehearsals import Mesh

MEASURED = json.loads((REPO / "results" / "activations.json").read_text())["rows"]
ONE_PROCESS, *GROUPS = MEASURED
MOST_ABOVE = 0.05  # above 1/size, the bound of the promise; the results are 4.4% above it


def kept_by(model, x):
    with SavedTensors(model) as saved:
        model(x)
    return saved.bytes


def test_each_storage_counts_once_and_weights_do_not():
    x = torch.zeros(4, 8)
    linear = torch.nn.Linear(8, 16)
    assert kept_by(linear, x) == x.nbytes
    two_of_one_input = torch.nn.ModuleList([linear, torch.nn.Linear(8, 2)])
    two_of_one_input.forward = lambda x: [linear(x) for linear in two_of_one_input]
    assert kept_by(two_of_one_input, x) == x.nbytes
    # tanh keeps its result, which the next layer keeps as its input
    chain = torch.nn.Sequential(linear, torch.nn.Tanh(), torch.nn.Linear(16, 2))
    assert kept_by(chain, x) == x.nbytes + 4 * 4 * 16


def test_the_backward_pass_under_the_counter_gives_the_same_gradients():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    x = torch.randn(4, 8)
    model(x).sum().backward()
    expected = [weight.grad.clone() for weight in model.parameters()]
    model.zero_grad()
    with SavedTensors(model):
        loss = model(x).sum()
    loss.backward()
    for weight, gradient in zip(model.parameters(), expected, strict=True):
        assert torch.equal(weight.grad, gradient)


def test_every_group_was_measured_at_every_length():
    found = []
    for row in MEASURED:
        mesh = Mesh(row["config"], row["size"], tuple(row["sizes"]))
        found.append(activations.Group(row["kind"], mesh))
    assert found == list(activations.GROUPS)
    for row in MEASURED:
        assert [int(length) for length in row["bytes"]] == list(activations.LENGTHS)
        assert all(len(ranks) == row["size"] for ranks in row["bytes"].values())


@pytest.mark.parametrize("row", GROUPS, ids=lambda row: f"{row['kind']}-{row['size']}")
def test_ranks_that_share_a_row_each_keep_their_share(row):
    for length, (whole,) in ONE_PROCESS["bytes"].items():
        share = whole / row["size"]
        for kept in row["bytes"][length]:
            assert share < kept < (1 + MOST_ABOVE) * share
