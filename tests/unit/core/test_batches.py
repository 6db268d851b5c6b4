# SPDX-License-Identifier: Apache-2.0
"""Batches cover every row once in each epoch, however they are cut, packed and laid out, without a
token lost, doubled, or trained on from another row.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset

from core.batches import TokenCollator, pack

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
    return pack([len(ids) for ids in rows["input_ids"]], WIDTH)


def collate(rows, lines, pad_token_id=0, **options):
    return TokenCollator(pad_token_id=pad_token_id, **options)(rows, lines)


# ---- Batches of tokens ----
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


def test_all_packed_batches_have_one_shape(rows):
    lines = lines_of(rows, "packed")
    for number in range(4):  # Where an epoch ends, a rank may have few lines or none
        plain = collate(rows, lines[:number], width=WIDTH)
        batch = collate(rows, lines[:number], width=WIDTH, height=3)
        assert batch["inputs"].keys() == {"input_ids", "position_ids"}
        for name, value in batch["inputs"].items():
            assert value.shape == (3, WIDTH)
            assert torch.equal(value[:number], plain["inputs"][name][:number])
        for name in ("positions", "targets", "counts"):
            assert torch.equal(batch[name], plain[name])


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
