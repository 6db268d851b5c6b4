# SPDX-License-Identifier: Apache-2.0
"""A model's logits and answers do not depend on which prompts share its batch."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from merging import contestants

ROWS = [[5, 6, 7, 8, 9], [40], [11, 12]]
ANSWERS = [[20, 21, 3], [22], [23, 24]]


@pytest.fixture(scope="module")
def model(tiny):
    return AutoModelForCausalLM.from_pretrained(tiny / "model").eval()


def test_logits_of_a_padded_batch_are_those_of_each_prompt(model):
    found = contestants.predict(model, ROWS, ANSWERS, pad=0, num_places=4)
    assert [len(logits) for logits in found] == [4, 1, 3]
    for row, answer, logits in zip(ROWS, ANSWERS, found, strict=True):
        whole = model(torch.tensor([[*row, *answer]])).logits[0]
        # The last token of an answer predicts nothing that is compared
        expected = whole[:-1][-len(logits) :]
        assert torch.allclose(logits, expected, atol=1e-5)
        assert logits.argmax(1)[-1] == whole[-2].argmax()


def test_answers_of_a_padded_batch_are_those_of_each_prompt(model):
    decoding = GenerationConfig(do_sample=False, max_new_tokens=6, eos_token_id=[3], pad_token_id=0)
    together = contestants.generate(model, ROWS, decoding, pad=0)
    apart = [contestants.generate(model, [row], decoding, pad=0)[0] for row in ROWS]
    assert together == apart
    for answer in together:
        assert len(answer) == 6 or answer[-1] == 3


def test_the_end_of_a_turn_is_an_end_although_no_config_lists_it(model, tiny):
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    end = tokenizer.convert_tokens_to_ids("<|end_of_turn|>")
    before = model.generation_config.eos_token_id
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    try:
        assert contestants.stop_tokens_of(model.generation_config) == {tokenizer.eos_token_id}
        ends = contestants.stop_tokens_of_recipe(model, tokenizer)
    finally:
        model.generation_config.eos_token_id = before
    assert ends == {end, tokenizer.eos_token_id}
