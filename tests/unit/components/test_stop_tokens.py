# SPDX-License-Identifier: Apache-2.0
"""The tokens that end an answer are those of the chat template, and what the model lists."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from chat_templates import tokenizer_of
from components.stop_tokens import (
    add_stop_tokens,
    end_of_turn,
    stop_tokens_of_turns,
)

FOLDER = Path(__file__).parents[2] / "data" / "chat_templates"
ENDS = {
    "deepseek_v3_1": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "glm4_5": None,  # the token that opens the next turn ends one, and the model lists it
    "gpt_oss": "<|return|>",
    "granite4": "<|end_of_text|>",
    "kimi_k2": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "<eos>",
    "olmo3": "<eos>",
    "phi4": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "smollm3": "<|im_end|>",
}
PHI3 = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{{ eos_token }}"
WITHOUT_END = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
REFUSES = "{{ raise_exception('a conversation begins with a system message') }}"


def model_that_lists(ends):
    return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=ends))


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.jinja")), ids=lambda path: path.stem)
def test_the_end_of_a_turn_is_the_token_after_an_answer(path):
    tokenizer = tokenizer_of(path.read_text(encoding="utf-8"))
    end = end_of_turn(tokenizer)
    assert (None if end is None else tokenizer.decode([end])) == ENDS[path.stem]


def test_a_token_that_closes_the_conversation_does_not_hide_the_end_of_turn():
    tokenizer = tokenizer_of(PHI3)
    ends = {tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id}
    assert stop_tokens_of_turns(tokenizer) == ends


@pytest.mark.parametrize("template", [WITHOUT_END, REFUSES])
def test_a_template_without_an_end_of_turn_adds_no_other_token(template):
    tokenizer = tokenizer_of(template + "<|user|><|assistant|>")
    tokenizer.chat_template = template
    assert end_of_turn(tokenizer) is None
    assert stop_tokens_of_turns(tokenizer) == {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("listed", "added", "after"),
    [(2, {2, 3}, [2, 3]), (None, {3}, [3]), ([7, 2], {3}, [2, 3, 7]), (0, {3}, [0, 3])],
)
def test_what_a_model_lists_becomes_a_list_with_every_end(listed, added, after):
    model = model_that_lists(listed)
    assert add_stop_tokens(model, added) == after
    assert model.generation_config.eos_token_id == after


@pytest.mark.parametrize("listed", [2, [3, 2]])
def test_a_model_that_lists_every_end_is_left_as_it_is(listed):
    model = model_that_lists(listed)
    assert add_stop_tokens(model, {2}) is None
    assert model.generation_config.eos_token_id == listed
