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
from core.loss import LossInHead
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


def test_a_batch_tells_the_router_loss_which_token_is_of_which_row():
    batch = collate_rows(ROWS, pad_token_id=99)
    assert batch["inputs"]["input_ids"].tolist() == [
        [1, 2, 3, 4, 5, 6, 7],
        [1, 2, *[99] * 5],
        [1, 2, 3, 4, *[99] * 3],
    ]
    routed = {name: numbers.tolist() for name, numbers in batch["routed"].items()}
    places, row = [*range(7), 7, 8, 14, 15, 16, 17], [0] * 7 + [1] * 2 + [2] * 4
    assert routed == {"places": places, "row": row, "lengths": [7, 2, 4]}
    assert batch["counts"].tolist() == [6 + 1 + 3, 13] and batch["row"] == [7, 2, 4]
    assert batch["positions"].tolist() == [*range(6), 7, 14, 15, 16]
    assert batch["targets"].tolist() == [2, 3, 4, 5, 6, 7, 2, 2, 3, 4]


@pytest.mark.parametrize("one_line", [False, True])
def test_a_rank_without_rows_adds_nothing(one_line):
    batch = collate_rows([], pad_token_id=99, one_line=one_line)
    assert batch["inputs"]["input_ids"].tolist() == [[99]] and batch["counts"].tolist() == [0, 0]
    assert batch["row"] == []
    logits = logits_of(batch)
    loss, load = mixtral.router_loss(logits, batch["routed"], TOP_K, of_one_rank)
    loss.backward()
    assert (
        loss == 0
        and load.tolist() == [[0] * EXPERTS] * LAYERS
        and all((layer.grad == 0).all() for layer in logits)
    )


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


def test_by_hand():
    # One layer, two experts, one per token: of three tokens two pick the first, with 0.8, and one
    # the second, with 0.6
    batch = collate_rows(
        [{"input_ids": np.arange(3), "labels": np.arange(3), "row": 1}], pad_token_id=99
    )
    logits = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]]).log()
    loss, load = mixtral.router_loss((logits,), batch["routed"], 1, of_one_rank)
    assert loss.item() == pytest.approx(
        3 * 2 * (2 / 3 * (0.8 + 0.8 + 0.4) / 3 + 1 / 3 * (0.2 + 0.2 + 0.6) / 3)
    )
    assert load.tolist() == [[2, 1]]


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
    "flags",
    [[], ["--gradient_checkpointing"], ["--use_peft"], ["--use_peft", "--gradient_checkpointing"]],
    ids=" ".join,
)
def test_what_is_trained_has_gradients_from_both_losses_also_without_rows(flags, load):
    args, model = load(*flags)
    token_loss = LossInHead(model, 256, torch.device("cpu"))
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    loss, aux_loss, _ = mixtral.summed_losses(
        ONE_PROCESS, model, token_loss, collate_rows([], 0), TOP_K
    )
    (loss + aux_loss).backward()  # as on a rank that has none
    assert loss == 0 and all((weight.grad == 0).all() for weight in trained.values())
    batch = collate_rows(ROWS, 0)
    loss, aux_loss, routed = mixtral.summed_losses(ONE_PROCESS, model, token_loss, batch, TOP_K)
    assert routed.sum(1).tolist() == [13 * TOP_K] * len(routed)
    assert len(routed) == model.config.num_hidden_layers  # recomputed or not, each layer's once
    gradients = torch.autograd.grad(
        aux_loss, list(trained.values()), retain_graph=True, allow_unused=True
    )
    early = [
        name
        for name, grad in zip(trained, gradients, strict=True)
        if grad is not None and grad.abs().sum() > 0
    ]
    assert any(".experts." in name for name in early) and any("q_proj" in name for name in early)
    loss.backward()
    assert all(
        weight.grad.abs().sum() > 0
        for name, weight in trained.items()
        if not flags or "lora_B" in name
    )


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
