# SPDX-License-Identifier: Apache-2.0
"""recipes/mixtral.py: the router's loss, adapters on the experts, and what is refused.

The router's loss is transformers' for one row, and a sum over rows however they are cut.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import mixtral
from core.cli import parse
from fakes import rows_of_their_own, sharing_rows

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
ONE_PROCESS = rows_of_their_own()
LAYERS, EXPERTS, TOP_K = 3, 5, 2
ROWS = [
    {"input_ids": np.arange(1, n + 1), "labels": np.arange(1, n + 1), "row": n} for n in (7, 2, 4)
]


def of_one_rank(sums):
    """The sum over the ranks that share rows, of which there is one."""
    return sums


def collate_rows(rows, pad_token_id, one_line=False):
    collate = mixtral.RoutedCollator(pad_token_id=pad_token_id, one_line=one_line)
    source = SimpleNamespace(__getitems__=lambda numbers: [rows[number] for number in numbers])
    return collate(source, [[number] for number in range(len(rows))])


def logits_of(batch, seed=0):
    """Router logits of each layer that depend only on the token, the same for each batch."""
    table = torch.randn(LAYERS, 100, EXPERTS, generator=torch.Generator().manual_seed(seed))
    return tuple(
        table[layer, batch["inputs"]["input_ids"].flatten()].requires_grad_()
        for layer in range(LAYERS)
    )


def loss_of(rows, seed=0):
    batch = collate_rows(rows, pad_token_id=99)
    return mixtral.router_loss(logits_of(batch, seed), batch["routed"], TOP_K, of_one_rank)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['row']} tokens")
def test_of_one_row_loss_and_gradient_are_those_of_transformers(row):
    batch = collate_rows([row], pad_token_id=99)
    ours, theirs = logits_of(batch), logits_of(batch)
    loss, _ = mixtral.router_loss(ours, batch["routed"], TOP_K, of_one_rank)
    expected = row["row"] * load_balancing_loss_func(
        theirs, EXPERTS, TOP_K
    )  # weighted with its tokens
    torch.testing.assert_close(loss, expected)
    for mine, other in zip(
        torch.autograd.grad(loss, ours), torch.autograd.grad(expected, theirs), strict=True
    ):
        torch.testing.assert_close(mine, other)


def test_it_adds_up_however_the_batch_is_cut_and_padding_has_no_part():
    whole, load = loss_of(ROWS)
    for cut in ([[0], [1], [2]], [[0, 1], [2]], [[2, 0], [1]], [[], [0, 1, 2]]):
        parts = [loss_of([ROWS[i] for i in part]) for part in cut]
        torch.testing.assert_close(sum(loss for loss, _ in parts), whole)
        assert torch.equal(sum(load for _, load in parts), load)
    batch = collate_rows(ROWS, pad_token_id=99)
    mask = (batch["inputs"]["input_ids"] != 99).long()
    of_batch = load_balancing_loss_func(
        logits_of(batch), EXPERTS, TOP_K, mask
    )  # why it is not used as it is
    assert abs(of_batch - whole / 13) > 0.01
    assert load.sum(1).tolist() == [13 * TOP_K] * LAYERS


@pytest.mark.parametrize("lines", [[[0], [1], [2]], []], ids=["rows", "none"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_the_ranks_that_share_rows_it_adds_up_to_one_process(ranks, lines):
    collate = mixtral.RoutedCollator(99, pad_to_multiple_of=ranks)
    source = SimpleNamespace(__getitems__=lambda numbers: [ROWS[number] for number in numbers])
    batch = collate(source, lines)
    logits = logits_of(batch)
    counted = []
    whole, whole_load = mixtral.router_loss(
        logits, batch["routed"], TOP_K, lambda counts: counted.append(counts) or counts
    )
    whole_gradients = torch.autograd.grad(whole, logits)
    loss, load = torch.zeros(()), torch.zeros(LAYERS, EXPERTS)
    gradients = [torch.zeros_like(layer) for layer in logits]
    for rank in range(ranks):
        with sharing_rows(ranks, rank).part_of(batch) as part:
            shape = *batch["inputs"]["input_ids"].shape, EXPERTS
            own = [layer.view(shape).chunk(ranks, 1)[rank].flatten(0, 1) for layer in logits]
            routed = mixtral.routed_of_part(part)
            sums = mixtral.router_loss(own, routed, TOP_K, lambda counts: counted[0])
        loss, load = loss + sums[0], load + sums[1]
        for total, gradient in zip(gradients, torch.autograd.grad(sums[0], logits), strict=True):
            total += gradient
    torch.testing.assert_close((loss, load), (whole, whole_load))
    torch.testing.assert_close(gradients, list(whole_gradients))


@pytest.fixture
def load(tiny_of):
    """A function from flags to arguments and the tiny mixture as the recipe loads it."""

    def load(*flags, model=None):
        words = ["--model_name_or_path", str(model or tiny_of("mixtral") / "model"), *flags]
        args = parse(mixtral.Arguments, words=words)
        return args, mixtral.load_model(args, ONE_PROCESS)

    return load


@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        (["--lora_r", "4"], ATTENTION | {"experts"}),
        (["--lora_target_parameters"], ATTENTION),
        (["--lora_target_parameters", "gate.weight"], ATTENTION | {"gate"}),
    ],
    ids=["default", "no experts", "router too"],
)
def test_adapters_sit_where_the_flags_say(flags, modules, load):
    args, model = load("--use_peft", *flags)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name for name in trained)
    parts = {part for name in trained for part in name.split(".")}
    assert {part for part in parts if part.endswith(("_proj", "gate", "experts"))} == modules
    assert mixtral.router_loss_factor(model, args) == 0.001
    experts = sum(weight.numel() for name, weight in trained.items() if ".experts." in name)
    # 2 layers x 4 experts x rank 4 x (in + out) of both matrices
    expected = 2 * 4 * 4 * ((320 + 2 * 128) + (128 + 320))
    assert experts == (expected if "experts" in modules else 0)
