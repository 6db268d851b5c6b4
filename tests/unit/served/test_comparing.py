# SPDX-License-Identifier: Apache-2.0
"""What a server may say differently from the trained model, and what is an error."""

from dataclasses import replace

import pytest
import torch

from generation.trained import Answers
from served.client import Reply
from served.comparing import judge

BOUND = 0.01  # relative to the largest logit, which is 10: logits may differ by 0.1
WORDS = ["", " lamp", " red", " blue", "é"]  # by token; the first ends an answer, and is special
END = 0
# An answer "lamp red" and its end. At its second token " blue" is nearly as likely.
TOKENS = [1, 2, END]
LOGITS = torch.tensor(
    [[0.0, 10.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 8.9, 0.0], [9.0, 0.0, 0.0, 0.0, 0.0]]
)


class Tokenizer:
    """Writes words."""

    all_special_tokens = ("<begin>", "<end>")

    def decode(self, tokens, skip_special_tokens):
        assert skip_special_tokens
        return "".join(WORDS[token] for token in tokens)


@pytest.fixture
def trained():
    """Answers to one prompt of two tokens."""
    return Answers("float32", [[7, 8]], [TOKENS], [LOGITS], [END])


GOOD = Reply(" lamp red", "stop", 2)


def verdict_of(trained, max_new_tokens=16, **changes):
    reply = replace(GOOD, **changes)
    return judge(trained, [reply], Tokenizer(), BOUND, max_new_tokens)


def test_the_same_answer_is_the_same(trained):
    verdict = verdict_of(trained)
    assert verdict.problems == [] and verdict.same_answers == verdict.same_lengths == 1
    assert verdict.to_json()["passed"] and "1/1 same" in verdict.table(trained)[-1]


def test_another_answer_is_an_error(trained):
    (problem,) = verdict_of(trained, text=" red").problems
    assert "the answer to prompt 1 is 'red', but the trained model says 'lamp red'" in problem
    assert "(1 of 1 prompts)" in problem


def test_of_two_tokens_that_are_nearly_as_likely_either_may_come_first(trained):
    verdict = verdict_of(trained, text=" lamp blue blue")
    assert verdict.problems == [] and verdict.same_answers == 0
    assert verdict_of(trained, text=" lamp lamp").problems


def test_farther_from_each_other_they_may_not_change_places(trained):
    logits = LOGITS.clone()
    logits[1, 3] = 8.7
    assert verdict_of(replace(trained, logits=[logits]), text=" lamp blue").problems


def test_an_answer_that_runs_on_is_told_from_another_one(trained):
    (problem,) = verdict_of(trained, text=" lamp red red red", end="length").problems
    assert "runs on after 'lamp red'" in problem and "does not end at token 0" in problem
    assert "eos_token_id" in problem


def test_an_answer_may_not_end_where_the_trained_one_goes_on(trained):
    cut = replace(trained, tokens=[[1, 2]], logits=[LOGITS[:2]])
    assert verdict_of(cut, max_new_tokens=2, end="length").problems == []
    assert verdict_of(cut, max_new_tokens=2, end="stop").problems
    assert verdict_of(cut, max_new_tokens=2, text=" lamp red red", end="length").problems


def test_another_number_of_tokens_of_a_prompt_is_an_error(trained):
    verdict = verdict_of(trained, num_prompt_tokens=3)
    (problem,) = verdict.problems
    assert "3 tokens of prompt 1, but training made 2 (1 of 1 prompts)" in problem
    assert verdict.same_answers == 1 and verdict.same_lengths == 0


@pytest.mark.parametrize(("shift", "is_wrong"), [(0.0, False), (0.19, False), (0.21, True)])
def test_log_probabilities_may_differ_up_to_the_bound(shift, is_wrong, trained):
    logprobs = LOGITS.log_softmax(-1).gather(1, torch.tensor(TOKENS)[:, None]).flatten() + shift
    verdict = verdict_of(trained, logprobs=logprobs.tolist())
    assert verdict.gap == pytest.approx(shift, abs=1e-5) and bool(verdict.problems) == is_wrong
    assert not is_wrong or "the bound is 0.2" in verdict.problems[0]


def test_special_tokens_in_an_answer_are_named(trained):
    (problem,) = verdict_of(trained, text=" lamp red<end><begin>", end="length").problems
    assert "writes <end> into the answer to prompt 1 (1 of 1 prompts)" in problem
    assert "another chat template" in problem
