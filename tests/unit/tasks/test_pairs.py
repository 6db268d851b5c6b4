# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers become batches of lines with both."""

from datasets import Dataset

from tasks.pairs import PairCollator

PAIRS = [
    {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10], "row": 3},
    {"prompt_ids": [11], "chosen_ids": [12], "rejected_ids": [13, 14], "row": 8},
]


def test_for_flash_attention_the_lines_lie_behind_one_another():
    batch = PairCollator(0, one_line=True)(Dataset.from_list(PAIRS), [[1], [0]])
    inputs = batch["inputs"]
    assert inputs["input_ids"].tolist() == [[11, 12, 5, 6, 7, 8, 9, 11, 13, 14, 5, 6, 10]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 2, 7, 10, 13]
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (5, 5)
    before = inputs["input_ids"].flatten()[batch["positions"]]
    assert before.tolist() == [11, 6, 7, 8, 11, 13, 6]
    assert batch["targets"].tolist() == [12, 7, 8, 9, 13, 14, 10]
