# SPDX-License-Identifier: Apache-2.0
"""Rows become batches, however they are laid out, without a token lost, doubled, or trained on
from another row.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig

from components.head_loss import LossInHead
from components.lines import best_fit
from components.packing import TokenCollator

CPU = torch.device("cpu")
WIDTH = 64
LAYOUTS = {"padded": {}, "packed": {"width": WIDTH}, "padding free": {"refit": True}}


@pytest.fixture(scope="module")
def rows():
    """40 random rows, the first part of each a prompt."""
    chance = np.random.default_rng(0)
    rows = []
    for number in range(40):
        length = int(chance.integers(4, 40))
        ids, prompt = chance.integers(1, 320, length).tolist(), int(chance.integers(0, length - 1))
        rows.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:], "row": number + 1})
    return Dataset.from_list(rows).with_format("numpy")


def lines_of(rows, layout):
    if layout != "packed":
        return [[number] for number in range(len(rows))]
    return best_fit([len(ids) for ids in rows["input_ids"]], WIDTH)


def collate(rows, lines, pad_token_id=0, **options):
    return TokenCollator(pad_token_id=pad_token_id, **options)(rows, lines)


# ---- Batches ----
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_token_that_is_trained_on_is_there_once(layout, rows):
    batch = collate(rows, lines_of(rows, layout), **LAYOUTS[layout])
    ids = batch["inputs"]["input_ids"].flatten()
    found = zip(ids[batch["positions"]].tolist(), batch["targets"].tolist(), strict=True)
    wanted = Counter(
        (row["input_ids"][i - 1], row["input_ids"][i])
        for row in rows.with_format(None)
        for i in range(1, len(row["labels"]))
        if row["labels"][i] != -100
    )
    assert Counter(found) == wanted
    assert batch["counts"].tolist() == [wanted.total(), sum(len(ids) for ids in rows["input_ids"])]
    assert sorted(batch["row"]) == list(range(1, 41))


def test_padding_is_not_trained_on_where_its_token_ends_the_rows(rows):
    """Turns may end with the pad token; each of those ends is trained on."""
    two = rows.select(range(2))
    end = int(two[0]["input_ids"][-1])
    batch = collate(two, [[0], [1]], pad_token_id=end)
    labels = np.concatenate([row["labels"][1:] for row in two])
    assert batch["targets"].tolist() == labels[labels != -100].tolist()
    assert end in batch["targets"] and (batch["inputs"]["input_ids"][:, -1] == end).all()


def test_padding_free_batches_have_fewer_and_no_longer_lines(rows):
    padded, free = (collate(rows, lines_of(rows, "padded"), refit=refit) for refit in (False, True))
    assert free["inputs"]["input_ids"].shape[1] == padded["inputs"]["input_ids"].shape[1]
    assert len(free["inputs"]["input_ids"]) < 0.7 * len(padded["inputs"]["input_ids"])
    assert free["counts"].equal(padded["counts"])


@pytest.mark.parametrize("one_line", [False, True])
def test_a_rank_without_rows_gets_one_token_that_counts_nowhere(rows, one_line):
    batch = collate(rows, [], 3, one_line=one_line)
    assert batch["inputs"]["input_ids"].tolist() == [[3]]
    assert batch["counts"].tolist() == [0, 0] and batch["lengths"] == batch["row"] == []


# ---- In one line ----
def test_a_batch_in_one_line_tells_flash_attention_where_rows_end(rows):
    lines = lines_of(rows, "packed")
    inputs = collate(rows, lines, width=WIDTH, one_line=True)["inputs"]
    lengths = [len(ids) for line in lines for ids in rows[line]["input_ids"]]
    assert inputs["input_ids"].shape == (1, sum(lengths))
    assert inputs["max_length_q"] == max(lengths)
    assert inputs["cu_seq_lens_q"].dtype == torch.int32
    assert inputs["cu_seq_lens_q"].diff().tolist() == lengths
    assert (inputs["position_ids"] == 0).sum() == len(lengths)


# ---- The loss ----
def make_model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def loss_and_norm(loss, model):
    model.zero_grad()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    return loss.item(), norm.item()


@pytest.fixture(scope="module")
def one_by_one(rows):
    """The loss summed over the rows one by one, by transformers' own forward pass, and the norm."""
    model = make_model()
    total = 0
    for row in rows.with_format(None):
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"][1:])
        total = total + torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=-100, reduction="sum"
        )
    return loss_and_norm(total, model)


@pytest.mark.parametrize(
    ("layout", "one_line"),
    [*((name, False) for name in LAYOUTS), ("padded", True), ("packed", True)],
)
def test_the_loss_is_that_of_the_rows_one_by_one(layout, one_line, rows, one_by_one):
    model = make_model()
    batch = collate(rows, lines_of(rows, layout), one_line=one_line, **LAYOUTS[layout])
    assert (len(batch["inputs"]["input_ids"]) == 1) == one_line
    loss, norm = loss_and_norm(LossInHead(model, 256, CPU)(model, batch), model)
    assert loss == pytest.approx(one_by_one[0], rel=1e-6)
    assert norm == pytest.approx(one_by_one[1], rel=1e-5)
