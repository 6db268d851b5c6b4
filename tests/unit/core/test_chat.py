# SPDX-License-Identifier: Apache-2.0
"""Conversations become tokens, of which those of the assistant are trained on and no others."""

import copy
from pathlib import Path

import pytest
import trl
from transformers import AutoTokenizer

from chat_templates import HELLO, said_by, show, tokenizer_of
from core.chat import DEFAULT_TEMPLATE, ChatTemplate, make_conversation, tokenize_conversation

QUESTION = "Spell the word lamp."
ANSWER = "l-a-m-p"
TURNS = {
    "one answer": [("user", QUESTION), ("assistant", ANSWER)],
    "two answers": [
        ("system", "Be brief."),
        ("user", "a"),
        ("assistant", "one"),
        ("user", "b"),
        ("assistant", "two"),
    ],
    "a question last": [("user", "a"), ("assistant", "one"), ("user", "b")],
}


@pytest.fixture(scope="module")
def loaded(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture
def tokenizer(loaded):
    """A tokenizer that a test may change."""
    return copy.deepcopy(loaded)


def messages_of(name):
    return [{"role": role, "content": content} for role, content in TURNS[name]]


def tokenize(name, tokenizer, max_length=1024):
    return tokenize_messages(messages_of(name), tokenizer, max_length)


def tokenize_messages(messages, tokenizer, max_length=1024, **options):
    conversation = make_conversation(messages, tools=[])
    template = ChatTemplate(tokenizer)
    return tokenize_conversation(conversation, template, max_length, **options)


def trained_text(row, tokenizer):
    """The text of the tokens that are trained on."""
    return tokenizer.decode([token for token in row["labels"] if token != -100])


# ---- What is trained on ----
def test_an_end_of_turn_is_trained_on_where_it_is_the_pad_token_too(tokenizer):
    tokenizer.pad_token = "<|end_of_turn|>"
    row = tokenize("one answer", tokenizer)
    assert row["labels"][-1] == tokenizer.pad_token_id


@pytest.mark.parametrize("weight", [1, 0])
def test_the_last_answer_can_be_the_only_one(weight, tokenizer):
    messages = messages_of("two answers")
    messages[-1]["weight"] = weight
    learned = trained_text(tokenize_messages(messages, tokenizer, learn="last"), tokenizer)
    assert learned == ("two" if weight else "one") + "<|end_of_turn|>"


def test_a_conversation_that_ends_with_a_question_teaches_no_end_after_it(tokenizer):
    tokenizer.chat_template = DEFAULT_TEMPLATE
    row = tokenize("a question last", tokenizer)
    assert trained_text(row, tokenizer) == "one" + tokenizer.eos_token and row["labels"][-1] == -100


# ---- Length ----
def test_an_answer_cut_to_nothing_is_a_problem_and_one_cut_to_a_token_is_not(tokenizer):
    prompt = tokenize("one answer", tokenizer)["labels"].count(-100)
    with pytest.raises(ValueError, match=f"within --max_length {prompt}: {prompt} tokens are pro"):
        tokenize("one answer", tokenizer, prompt)
    assert tokenize("one answer", tokenizer, prompt + 1)["truncated"]


# ---- Templates made for a case ----
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|end|>{% endgeneration %}{% else %}{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{{ '<|assistant|>' if add_generation_prompt }}"
)
MARKED_TWICE = MARKED.replace(
    "{{ m.content }}<|end|>{% endgeneration %}",
    "{{ m.content }}{% endgeneration %}{% generation %}<|end|>{% endgeneration %}",
)


def template_of(text, **settings):
    return ChatTemplate(tokenizer_of(text + "<|end|><|user|><|assistant|><|tool|>"), settings)


def shown(text, messages):
    """Return the text of a conversation, with the parts that are trained on in [[ ]]."""
    template = template_of(text)
    template.tokenizer.chat_template = text
    conversation = make_conversation(messages, [])
    row = tokenize_conversation(conversation, template, 10**6)
    is_trained_on = [label != -100 for label in row["labels"]]
    return show(template.tokenizer, row["input_ids"], is_trained_on)


def with_weights(*weights):
    """Return a conversation with one answer of each of these weights."""
    messages = []
    for number, weight in enumerate(weights):
        messages += [said_by("user", "Hi."), said_by("assistant", f"No. {number}", weight=weight)]
    return messages


# ---- What is trained on ----
@pytest.mark.parametrize(
    "template",
    [PLAIN, MARKED, MARKED_TWICE],
    ids=["", "marked", "twice"],
)
@pytest.mark.parametrize("weights", [(1, 1), (0, 1), (1, 0), (1, 0, 1)], ids=str)
def test_an_answer_of_weight_0_is_the_only_one_that_is_not_trained_on(template, weights):
    expected = ""
    for number, weight in enumerate(weights):
        answer = f"No. {number}<|end|>"
        expected += "<|user|>Hi.<|end|><|assistant|>" + (f"[[{answer}]]" if weight else answer)
    assert shown(template, with_weights(*weights)) == expected


@pytest.mark.parametrize(
    ("ending", "learned"),
    [
        ("{% endgeneration %}<|end|>\n", "[[Hello.<|end|>]]\n"),
        ("{% endgeneration %}\n<|end|>", "[[Hello.\n<|end|>]]"),
        ("<|end|>\n{% endgeneration %}", "[[Hello.<|end|>\n]]"),
        ("{% endgeneration %}<|tool|>.<|end|>", "[[Hello.]]<|tool|>.<|end|>"),  # more of the turn
        ("{% endgeneration %}", "[[Hello.]]"),  # the token that opens the next turn is no end
    ],
    ids=["white space after", "before", "inside", "more", "none"],
)
def test_an_end_of_turn_that_is_not_marked_is_trained_on(ending, learned):
    template = MARKED.replace("<|end|>{% endgeneration %}", ending.replace("\n", "{{ '\n' }}"))
    text = shown(template, HELLO * 2)
    assert text.startswith(f"<|user|>{HELLO[0]['content']}<|end|><|assistant|>{learned}<|user|>")
    if "<|end|>" in learned.partition("]]")[0]:
        assert text.endswith(f"<|assistant|>{learned}")


# ---- Stop tokens ----
FOLDER = Path(trl.__file__).parent / "chat_templates"
ENDS = {
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "gemma3": "<end_of_turn>",
    "glm4moe": None,  # the token that opens the next turn ends one, and the model lists it
    "gptoss": "<|return|>",
    "llama3": "<|eot_id|>",
    "phi3": "<|end|>",
    "qwen3": "<|im_end|>",
}
PHI3 = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{{ eos_token }}"
WITHOUT_END = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
REFUSES = "{{ raise_exception('a conversation begins with a system message') }}"


@pytest.mark.parametrize("name", ENDS)
def test_the_end_of_a_turn_is_the_token_after_an_answer(name):
    text = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    assert ChatTemplate(tokenizer_of(text)).end_of_turn == ENDS[name]


def test_a_token_that_closes_the_conversation_does_not_hide_the_end_of_turn():
    tokenizer = tokenizer_of(PHI3)
    ends = {tokenizer.convert_tokens_to_ids("<|end|>"), tokenizer.eos_token_id}
    assert ChatTemplate(tokenizer).stop_tokens() == ends


@pytest.mark.parametrize("template", [WITHOUT_END, REFUSES])
def test_a_template_without_an_end_of_turn_adds_no_other_token(template):
    tokenizer = tokenizer_of(template + "<|user|><|assistant|>")
    tokenizer.chat_template = template
    assert ChatTemplate(tokenizer).stop_tokens() == {tokenizer.eos_token_id}
