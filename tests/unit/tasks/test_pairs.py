# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers are cut where they differ, and become batches of lines with both."""

import pytest
from datasets import Dataset

from row_files import TURNS_OF_A_PAIR
from tasks.pairs import PairCollator, read_pair, shared_length, split_shared_prompt

QUESTION = "Spell the word lamp."
TURNS = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "l-a-m-p"}]

PAIRS = [
    {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10], "row": 3},
    {"prompt_ids": [11], "chosen_ids": [12], "rejected_ids": [13, 14], "row": 8},
]


def batch_of(numbers, learn_prompts=False, one_line=False):
    collate = PairCollator(0, one_line=one_line, learn_prompts=learn_prompts)
    return collate(Dataset.from_list(PAIRS), [[number] for number in numbers])


# ---- Rows ----
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}, ("1 + 1 =", " 2", " 3")),
        ({"chosen": "1 + 1 = 2", "rejected": "1 + 1 = 3"}, ("1 + 1 =", " 2", " 3")),
        (TURNS_OF_A_PAIR, tuple(TURNS_OF_A_PAIR.values())),
        ({"prompt": QUESTION, "chosen": TURNS, "rejected": TURNS}, (TURNS[:1], *[TURNS[1:]] * 2)),
    ],
    ids=["texts", "texts with the prompt", "messages", "messages with the prompt"],
)
def test_a_pair_is_a_prompt_and_two_answers_of_one_kind(row, wanted):
    assert read_pair(row) == wanted


def test_the_prompt_ends_where_the_answers_differ_and_before_the_space():
    assert split_shared_prompt("1 + 1 = 2", "1 + 1 = 3") == ("1 + 1 =", " 2", " 3")
    assert split_shared_prompt("ab", "ab cd") == ("a", "b", "b cd")  # each keeps a letter
    assert split_shared_prompt(["q", "a"], ["q", "b"]) == (["q"], ["a"], ["b"])


def test_sequences_share_what_they_begin_with():
    assert shared_length([1, 2, 3], [1, 2], [1, 2, 4]) == 2 and shared_length("ab", "cb") == 0


# ---- Batches ----
def test_chosen_lines_come_first_padded_on_the_right():
    batch = batch_of([1, 0])
    assert batch["inputs"]["input_ids"].tolist() == [
        [11, 12, 0, 0, 0],
        [5, 6, 7, 8, 9],
        [11, 13, 14, 0, 0],
        [5, 6, 10, 0, 0],
    ]
    assert batch["pairs"].tolist() == [1, 0] and batch["row"] == [8, 3]
    assert batch["lengths"].tolist() == [[1, 3], [2, 1]]


def test_the_tokens_of_the_answers_are_predicted_each_from_the_one_before():
    batch = batch_of([0, 1])
    assert batch["targets"].tolist() == [7, 8, 9, 12, 10, 13, 14]
    before = batch["inputs"]["input_ids"].flatten()[batch["positions"]]
    assert before.tolist() == [6, 7, 8, 11, 6, 11, 13]
    # Pairs, tokens of chosen lines that are trained on, tokens
    assert batch["counts"].tolist() == [2, 4, 5 + 2 + 3 + 3]


def test_orpo_learns_the_prompts_of_chosen_lines_too():
    batch = batch_of([0, 1], learn_prompts=True)
    assert batch["targets"].tolist() == [6, 7, 8, 9, 12, 10, 13, 14] and batch["counts"][1] == 5


def test_for_flash_attention_the_lines_lie_behind_one_another():
    batch = batch_of([1, 0], one_line=True)
    inputs = batch["inputs"]
    assert inputs["input_ids"].tolist() == [[11, 12, 5, 6, 7, 8, 9, 11, 13, 14, 5, 6, 10]]
    assert inputs["position_ids"].tolist() == [[0, 1, 0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2]]
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 2, 7, 10, 13]
    assert (inputs["max_length_q"], inputs["max_length_k"]) == (5, 5)
    before = inputs["input_ids"].flatten()[batch["positions"]]
    assert before.tolist() == [11, 6, 7, 8, 11, 13, 6]
    assert batch["targets"].tolist() == [12, 7, 8, 9, 13, 14, 10]
