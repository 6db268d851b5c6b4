# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_dpo.py: pairs of every form, batches, and losses and metrics worked out by hand."""

import math
from argparse import Namespace

import pytest
import torch
from datasets import Dataset

import llama_dpo
from core.chat import ChatTemplate
from fakes import rows_of_their_own, sharing_rows
from tiny.llama import make_model
from tiny.options import LlamaOptions

ONE_PROCESS = rows_of_their_own()
USER = {"role": "user", "content": "Say a."}
GOOD, BAD = ({"role": "assistant", "content": text} for text in "ab")
EXPLICIT = {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}


def make_model_and_tokenizer():
    return make_model(LlamaOptions(hidden_size=64, intermediate_size=64, num_attention_heads=2))


@pytest.fixture(scope="module")
def tiny():
    """A tiny model and its tokenizer."""
    return make_model_and_tokenizer()


def pair_of(row, tokenizer, max_length=100):
    """Prompt, chosen and rejected answer as text, as they are trained on."""
    found = llama_dpo.tokenize_answers(row, ChatTemplate(tokenizer), max_length)
    return [tokenizer.decode(found[f"{part}_ids"]) for part in ("prompt", "chosen", "rejected")]


class TestRows:
    @pytest.mark.parametrize(
        "prompt", [{}, {"prompt": None}, {"prompt": "Say a."}], ids=["none", "null", "text"]
    )
    def test_answers_that_begin_with_the_prompt_are_parted_where_they_differ(self, prompt, tiny):
        whole = {"chosen": [USER, GOOD], "rejected": [USER, BAD]}
        assert pair_of(prompt | whole, tiny[1]) == pair_of(EXPLICIT, tiny[1])
        assert pair_of(EXPLICIT, tiny[1])[1:] == ["a<|end_of_turn|>", "b<|end_of_turn|>"]


PAIRS = [
    {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10], "row": 3},
    {"prompt_ids": [11], "chosen_ids": [12], "rejected_ids": [13, 14], "row": 8},
]


class TestLogps:
    @pytest.mark.parametrize("learn_prompts", [False, True])
    def test_those_of_the_parts_of_a_row_add_up_to_the_row(self, learn_prompts):
        collate = llama_dpo.PairCollator(0, learn_prompts=learn_prompts, pad_to_multiple_of=2)
        batch = collate(Dataset.from_list(PAIRS), [[0], [1]])
        # The loss of a token is the same on any rank
        token_loss = Namespace(losses=lambda _, part: (part["targets"] / 10, None))
        whole = llama_dpo.answer_logps(ONE_PROCESS, None, token_loss, batch)
        by_pair, prompts = torch.zeros(2, 2), torch.zeros(())
        for rank in range(2):
            with sharing_rows(2, rank).part_of(batch) as part:
                sums = llama_dpo.answer_logps(ONE_PROCESS, None, token_loss, part)
            assert len(part["targets"]) < len(batch["targets"])
            by_pair, prompts = by_pair + sums[0], prompts + sums[1]
        torch.testing.assert_close((by_pair, prompts), whole)


class TestLosses:
    scores, lengths = torch.tensor([[1.0, -2.0], [-1.0, 1.0]]), torch.tensor([[2, 4], [1, 2]])
    sigmoid = staticmethod(lambda x: math.log(1 + math.exp(-x)))

    @pytest.mark.parametrize(
        ("loss_type", "wanted"),
        [
            ("sigmoid", [sigmoid(0.5 * 2), sigmoid(0.5 * -3)]),
            ("sigmoid_norm", [sigmoid(0.5 * 1.5), sigmoid(0.5 * -1)]),
            ("ipo", [(1.5 - 1) ** 2, (-1 - 1) ** 2]),
            ("hinge", [0.0, 2.5]),
        ],
    )
    def test_by_hand(self, loss_type, wanted):
        found = llama_dpo.preference_losses(self.scores, self.lengths, loss_type, 0.5)
        assert found.tolist() == pytest.approx(wanted, rel=1e-6)

    def test_orpo_by_hand(self):
        chosen, rejected = math.log(0.5), math.log(0.2)  # odds of 1 and of 1/4
        found = llama_dpo.preference_losses(torch.tensor([[chosen], [rejected]]), None, "orpo", 0.1)
        assert found.tolist() == pytest.approx([0.1 * self.sigmoid(math.log(4))], rel=1e-6)
