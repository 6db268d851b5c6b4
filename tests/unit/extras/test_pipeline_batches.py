# SPDX-License-Identifier: Apache-2.0
"""A batch is cut into micro-batches of one shape, with the targets of each."""

import pytest
import torch
from datasets import Dataset

from core.batches import TokenCollator
from extras.pipeline.batches import PipelineCollator, micro_batches_of

ROWS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "row": 1},
    {"input_ids": [8, 9, 10, 11], "labels": [-100, -100, 10, 11], "row": 2},
    {"input_ids": [12, 13], "labels": [-100, -100], "row": 3},
]


def batch_of(num_rows, num_microbatches, lines, width=0):
    collator = PipelineCollator(TokenCollator(0, width=width), num_rows, num_microbatches)
    return collator(Dataset.from_list(ROWS), lines)


@pytest.mark.parametrize("num_microbatches", [1, 2, 4])
def test_the_micro_batches_have_the_targets_of_the_whole(num_microbatches):
    lines = [[0], [1], [2]]
    batch = batch_of(4, num_microbatches, lines)
    tokens = batch["inputs"]["input_ids"]
    assert tokens.shape == (4, 4) and tokens[3].tolist() == [0] * 4  # A row of padding
    found = []
    for part, ids in zip(micro_batches_of(batch), tokens.chunk(num_microbatches), strict=True):
        for place, target in zip(part["positions"], part["targets"], strict=True):
            found.append((int(ids.flatten()[place]), int(target)))
    assert found == [(5, 6), (6, 7), (9, 10), (10, 11)]
    assert batch["counts"].tolist() == [4, 9] and batch["row"] == [1, 2, 3]


def test_packed_rows_keep_their_positions_in_each_micro_batch():
    batch = batch_of(2, 2, [[0, 1], [2]], width=8)
    first, second = micro_batches_of(batch)
    assert first["inputs"]["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert second["inputs"]["position_ids"].shape == (1, 8)


def test_an_evaluation_batch_is_filled_up_to_whole_micro_batches():
    collator = PipelineCollator(TokenCollator(0), 4, 4).for_rows(6)
    batch = collator(Dataset.from_list(ROWS), [[0]])
    assert batch["inputs"]["input_ids"].shape == (8, 3)
    assert torch.equal(batch["counts"], torch.tensor([2, 3]))
