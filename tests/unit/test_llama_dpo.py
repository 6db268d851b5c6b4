# SPDX-License-Identifier: Apache-2.0
"""recipes/llama_dpo.py: pairs of every form, batches, and losses and metrics worked out by hand."""

import math
from argparse import Namespace
from contextlib import contextmanager

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model

import llama_dpo
from core.chat import ChatTemplate
from core.loss import LossInHead
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

    @pytest.mark.parametrize(
        ("row", "word"),
        [
            # What else a pair must be: core/test_conversations.py
            (EXPLICIT | {"rejected": [BAD | {"reasoning_content": "hm"}]}, "reasoning_content"),
            (EXPLICIT | {"rejected": [BAD | {"weight": 0}]}, "weight 0"),
            (EXPLICIT | {"chosen": [GOOD | {"content": ""}]}, "no answer"),
            ({"prompt": "", "chosen": "b", "rejected": "c"}, "no prompt"),
            (EXPLICIT | {"rejected": [GOOD]}, "no two different"),
            ({"prompt": "x" * 200, "chosen": "b", "rejected": "c"}, "--max_length 100"),
            ({"prompt": "x" * 98, "chosen": "abc", "rejected": "abd"}, "no two different"),
        ],
    )
    def test_a_row_that_cannot_be_used_says_why(self, row, word, tiny):
        with pytest.raises(ValueError, match=word):
            llama_dpo.tokenize_answers(row, ChatTemplate(tiny[1]), 100)


PAIRS = [
    {"prompt_ids": [5, 6], "chosen_ids": [7, 8, 9], "rejected_ids": [10], "row": 3},
    {"prompt_ids": [11], "chosen_ids": [12], "rejected_ids": [13, 14], "row": 8},
]


def batch_of(numbers, learn_prompts=False, one_line=False):
    collate = llama_dpo.PairCollator(0, one_line=one_line, learn_prompts=learn_prompts)
    return collate(Dataset.from_list(PAIRS), [[number] for number in numbers])


@contextmanager
def prepared(model, max_logits_mib=256):
    """The loss in the head of a model, as main prepares it, for a while."""
    head = model.get_output_embeddings()
    yield LossInHead(model, max_logits_mib, torch.device("cpu"))
    del head.forward


class TestLogps:
    @pytest.mark.parametrize("learn_prompts", [False, True])
    def test_they_are_those_of_each_line_alone(self, learn_prompts, tiny):
        model, batch = tiny[0], batch_of([0, 1], learn_prompts)

        def logp_of(prompt, answer):
            ids = torch.tensor([prompt + answer])
            by_token = (
                model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
            )
            return by_token[len(prompt) - 1 :].sum().item()

        wanted = [
            [logp_of(pair["prompt_ids"], pair[name]) for pair in PAIRS]
            for name in ("chosen_ids", "rejected_ids")
        ]
        of_prompts = logp_of([5], [6]) * learn_prompts
        flat = batch_of(
            [0, 1], learn_prompts, one_line=True
        )  # sdpa keeps its rows apart by their positions
        for mib, one in (
            (256, batch),
            (2 * 320 * 4 / 2**20, batch),
            (256, flat),
        ):  # at once, and two tokens at a time
            with prepared(model, mib) as token_loss:
                answers, prompts = llama_dpo.answer_logps(ONE_PROCESS, model, token_loss, one)
            torch.testing.assert_close(answers, torch.tensor(wanted))
            assert prompts.item() == pytest.approx(of_prompts, abs=1e-5)

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

    def test_without_rows_there_is_nothing_and_still_a_gradient(self, tiny):
        model, args = tiny[0], Namespace(loss_type="sigmoid", beta=0.1)
        with prepared(model) as token_loss:
            sums = llama_dpo.compare_answers(
                ONE_PROCESS, model, token_loss, batch_of([]), torch.zeros(2, 2), args
            )
            sums[0].backward()
        assert sums[0] == 0 and sums[1] == 0 and not sums[2].any()
        assert all(
            weight.grad is not None and not weight.grad.any() for weight in model.parameters()
        )
        model.zero_grad()

    def test_the_reference_is_the_model_without_its_adapters(self, tiny):
        model = get_peft_model(
            make_model_and_tokenizer()[0], LoraConfig(target_modules="all-linear")
        )
        token_loss = LossInHead(model, 256, torch.device("cpu"))
        batch, args = batch_of([0, 1]), Namespace(loss_type="sigmoid", beta=0.5)
        with torch.no_grad():
            before = llama_dpo.answer_logps(ONE_PROCESS, model, token_loss, batch)[0]
            for name, weight in model.named_parameters():
                if "lora_B" in name:
                    weight.normal_()
        changed = llama_dpo.answer_logps(ONE_PROCESS, model, token_loss, batch)[0]
        assert (changed - before).abs().min() > 0.01
        sums = llama_dpo.compare_answers(ONE_PROCESS, model, token_loss, batch, None, args)
        torch.testing.assert_close(sums[2][:2], 0.5 * (changed - before).sum(1))
        torch.testing.assert_close(
            sums, llama_dpo.compare_answers(ONE_PROCESS, model, token_loss, batch, before.T, args)
        )
        assert all(
            weight.requires_grad == ("lora" in name) for name, weight in model.named_parameters()
        )


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
