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
from components.checks import find_conflicts
from components.cli import parse_arguments
from components.head_loss import LossInHead
from components.mesh import part_of
from fakes import fake_accelerator, sharing_rows

ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
ONE_PROCESS = fake_accelerator()
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


def test_for_flash_attention_the_rows_lie_in_one_line():
    padded, flat = (
        collate_rows(ROWS, pad_token_id=99, one_line=one_line) for one_line in (False, True)
    )
    inputs = flat["inputs"]
    assert inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 1, 2, 1, 2, 3, 4]]
    assert inputs["position_ids"].tolist() == [[*range(7), 0, 1, *range(4)]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 7, 9, 13]
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (7, 7)
    for name in ("counts", "row"):
        assert list(flat[name]) == list(padded[name])
    assert flat["targets"].equal(padded["targets"])
    before = [
        batch["inputs"]["input_ids"].flatten()[batch["positions"]] for batch in (padded, flat)
    ]
    assert before[0].equal(before[1])
    (loss, load), (flat_loss, flat_load) = (
        mixtral.router_loss(logits_of(batch), batch["routed"], TOP_K, of_one_rank)
        for batch in (padded, flat)
    )
    assert loss.item() == pytest.approx(flat_loss.item(), rel=1e-6) and load.equal(flat_load)


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
        with part_of(sharing_rows(ranks, rank), batch) as part:
            shape = *batch["inputs"]["input_ids"].shape, EXPERTS
            own = [layer.view(shape).chunk(ranks, 1)[rank].flatten(0, 1) for layer in logits]
            routed = mixtral.routed_of_part(part)
            sums = mixtral.router_loss(own, routed, TOP_K, lambda counts: counted[0])
        loss, load = loss + sums[0], load + sums[1]
        for total, gradient in zip(gradients, torch.autograd.grad(sums[0], logits), strict=True):
            total += gradient
    torch.testing.assert_close((loss, load), (whole, whole_load))
    torch.testing.assert_close(gradients, list(whole_gradients))


def test_even_routing_costs_the_experts_a_token_and_more_is_worse():
    batch = collate_rows(
        [{"input_ids": np.arange(EXPERTS), "labels": np.arange(EXPERTS), "row": 1}], 99
    )
    even = torch.eye(EXPERTS) + torch.eye(EXPERTS).roll(
        1, 0
    )  # each expert is picked by two of five tokens
    loss, _ = mixtral.router_loss((even,), batch["routed"], TOP_K, of_one_rank)
    assert loss.item() / EXPERTS == pytest.approx(TOP_K)
    skewed, _ = mixtral.router_loss(
        (even + torch.tensor([9.0, 8, 0, 0, 0]),), batch["routed"], TOP_K, of_one_rank
    )
    assert skewed > 1.5 * loss


def test_going_down_its_gradient_evens_the_load():
    generator = torch.Generator().manual_seed(0)
    batch = collate_rows([{"input_ids": np.arange(200), "labels": np.arange(200), "row": 1}], 0)
    tokens = (
        torch.randn(200, 16, generator=generator) + 2
    )  # not around zero: some experts are liked by most
    router = torch.randn(16, EXPERTS, generator=generator).requires_grad_()
    loads = []
    for _ in range(100):
        loss, load = mixtral.router_loss((tokens @ router,), batch["routed"], TOP_K, of_one_rank)
        loads.append((load.max() / load.mean()).item())
        (gradient,) = torch.autograd.grad(loss / 200, router)
        router = (router - 0.3 * gradient).detach().requires_grad_()
    assert loads[0] > 1.8 and loads[-1] < 1.1


def test_the_means_name_the_busiest_expert_of_any_layer():
    accelerator = fake_accelerator(reduce=lambda sums: sums)
    load = torch.tensor([[4.0, 4.0, 4.0], [2.0, 3.0, 7.0]])
    means = mixtral.mean_losses(accelerator, torch.tensor([6.0, 9.0]), load, torch.tensor([3, 6]))
    assert means == pytest.approx({"loss": 2.0, "aux_loss": 1.5, "max_expert_load": 7 / 4})


@pytest.fixture
def load(tiny_of):
    """A function from flags to arguments and the tiny mixture as the recipe loads it."""

    def load(*flags, model=None):
        words = ["--model_name_or_path", str(model or tiny_of("mixtral") / "model"), *flags]
        args = parse_arguments(mixtral.Arguments, words=words)
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


def read_mixture(args, model):
    """Experts per token, factor of the router's loss, and what the start summary says of both."""
    top_k = model.config.get_text_config().num_experts_per_tok
    factor = mixtral.router_loss_factor(model, args)
    return top_k, factor, mixtral.describe_experts(model, top_k, factor)


@pytest.mark.parametrize(
    ("flags", "router", "modules"),
    [
        (["--lora_r", "4"], "frozen", ATTENTION | {"experts"}),
        (["--lora_target_parameters"], "frozen", ATTENTION),
        (
            ["--lora_target_parameters", "gate.weight", "experts.down_proj"],
            "trained",
            ATTENTION | {"experts", "gate"},
        ),
    ],
    ids=["default", "no experts", "router too"],
)
def test_adapters_sit_where_the_flags_say(flags, router, modules, load):
    args, model = load("--use_peft", *flags)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name for name in trained)
    parts = {part for name in trained for part in name.split(".")}
    assert {part for part in parts if part.endswith(("_proj", "gate", "experts"))} == modules
    top_k, factor, text = read_mixture(args, model)
    experts = sum(weight.numel() for name, weight in trained.items() if ".experts." in name)
    if not flags[0].startswith(
        "--lora_t"
    ):  # 2 layers x 4 experts x rank 4 x (in + out) of both matrices
        assert experts == 2 * 4 * 4 * ((320 + 2 * 128) + (128 + 320))
    assert (
        (top_k, factor) == (2, 0.001)
        and f"; {experts:,} of " in text
        and f"router {router}" in text
    )


def test_full_weights_train_router_and_experts(load):
    args, model = load("--router_aux_loss_coef", "0.5")
    _, factor, text = read_mixture(args, model)
    assert factor == 0.5 and "router trained, 0.5 x" in text
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_dense_model_is_refused(load, tiny, capsys):
    with pytest.raises(SystemExit, match="64"):
        load(model=tiny / "model")
    assert "LlamaForCausalLM has no router loss" in capsys.readouterr().err


def test_dropout_on_what_is_no_layer_is_refused():
    def problems(*flags):
        words = ["--lora_dropout", "0.1", *flags]
        return list(find_conflicts(parse_arguments(mixtral.Arguments, words=words)))

    assert "--lora_dropout is for adapters of linear layers" in problems("--use_peft")[0]
    assert problems("--use_peft", "--lora_target_parameters") == []
    assert problems() == ["--lora_dropout: for adapters only: add --use_peft"]
