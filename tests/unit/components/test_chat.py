# SPDX-License-Identifier: Apache-2.0
"""Conversations become tokens, of which those of the assistant are trained on and no others."""

import copy

import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from components.chat import (
    DEFAULT_CHAT_TEMPLATE,
    check_own_template,
    tokenize_conversation,
)
from components.chat_template import ChatTemplate
from components.conversations import make_conversation

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
OPEN_ENDED = (
    "{% for turn in messages %}{{ turn['role'] + ': ' + turn['content'] + '\n' }}{% endfor %}"
    "{{ 'assistant: ' if add_generation_prompt }}"
)
REWRITES_EARLIER_TURNS = (
    "{% for turn in messages %}{{ '<|' + turn['role'] + '|>' }}"
    "{{ '(thinks) ' if loop.last and turn['role'] == 'assistant' }}"
    "{{ turn['content'] + '<|end_of_turn|>' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


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


def tokenize_messages(messages, tokenizer, max_length=1024, row=None, **options):
    conversation = make_conversation(messages, tools=[])
    template = ChatTemplate(tokenizer)
    return tokenize_conversation(row or {}, conversation, template, max_length, **options)


def trained_text(row, tokenizer):
    """The text of the tokens that are trained on."""
    return tokenizer.decode([token for token in row["labels"] if token != -100])


# ---- What is trained on ----
def test_an_answer_is_trained_on_with_its_end_of_turn(tokenizer):
    row = tokenize("one answer", tokenizer)
    assert trained_text(row, tokenizer) == ANSWER + "<|end_of_turn|>"
    assert row["labels"][-1] == row["input_ids"][-1]


def test_an_end_of_turn_is_trained_on_where_it_is_the_pad_token_too(tokenizer):
    tokenizer.pad_token = "<|end_of_turn|>"
    row = tokenize("one answer", tokenizer)
    assert row["labels"][-1] == tokenizer.pad_token_id


def test_a_prompt_is_tokenized_as_generation_will_see_it(tokenizer):
    row = tokenize("one answer", tokenizer)
    prompt = tokenizer.apply_chat_template(
        messages_of("one answer")[:1], add_generation_prompt=True, return_dict=False
    )
    assert row["input_ids"][: len(prompt)] == prompt
    assert row["labels"][: len(prompt)] == [-100] * len(prompt)


# ---- Templates ----
def test_without_a_chat_template_the_default_ends_the_answer_with_eos(tokenizer):
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    row = tokenize("one answer", tokenizer)
    assert trained_text(row, tokenizer) == ANSWER + tokenizer.eos_token


def test_a_template_that_leaves_the_turn_open_gets_an_end(tokenizer):
    tokenizer.chat_template = OPEN_ENDED
    text = trained_text(tokenize("one answer", tokenizer), tokenizer)
    assert text.endswith(tokenizer.eos_token) and ANSWER in text


def test_a_template_that_rewrites_earlier_answers_teaches_the_last_alone(tokenizer):
    tokenizer.chat_template = REWRITES_EARLIER_TURNS
    row = tokenize("two answers", tokenizer)
    assert trained_text(row, tokenizer) == "(thinks) two<|end_of_turn|>"


def test_a_conversation_that_ends_with_a_question_teaches_no_end_after_it(tokenizer):
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    row = tokenize("a question last", tokenizer)
    assert trained_text(row, tokenizer) == "one" + tokenizer.eos_token and row["labels"][-1] == -100


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages[0]['content'] }}", "message 2 .assistant. has content, which the chat"),
        ("", "message 1 .user. has content, which the chat template drops"),
        (ANSWER + QUESTION, "no answer in the text that the chat template makes of it"),
    ],
    ids=["no answers", "nothing", "always the same"],
)
def test_a_template_without_the_answer_is_a_problem_of_the_row(template, says, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=says):
        tokenize("one answer", tokenizer)


def test_a_tokenizer_that_does_not_tell_offsets_is_an_error():
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    with pytest.raises(ValueError, match="does not tell where in a text its tokens are"):
        tokenize("one answer", tokenizer)


# ---- Length ----
def test_long_rows_lose_their_end_and_say_so(tokenizer):
    full = tokenize("one answer", tokenizer)
    cut = tokenize("one answer", tokenizer, len(full["input_ids"]) - 3)
    assert not full["truncated"] and cut["truncated"]
    assert cut["input_ids"] == full["input_ids"][:-3] and cut["labels"] == full["labels"][:-3]
    assert (full["length"], cut["length"]) == (len(full["input_ids"]), len(cut["input_ids"]))
    assert full["largest"] == max(full["input_ids"]) and full["hash"] != cut["hash"]


def test_an_answer_cut_to_nothing_is_a_problem_and_one_cut_to_a_token_is_not(tokenizer):
    prompt = tokenize("one answer", tokenizer)["labels"].count(-100)
    with pytest.raises(ValueError, match=f"within --max_length {prompt}: {prompt} tokens are pro"):
        tokenize("one answer", tokenizer, prompt)
    assert tokenize("one answer", tokenizer, prompt + 1)["truncated"]


@pytest.mark.parametrize("name", TURNS)
def test_on_request_every_token_is_trained_on(name, tokenizer):
    plain = tokenize(name, tokenizer)
    whole = tokenize_messages(messages_of(name), tokenizer, answers_only=False)
    assert whole["labels"] == whole["input_ids"] == plain["input_ids"] != plain["labels"]


def test_a_row_that_is_cut_is_not_said_to_be_too_long_for_the_model(tokenizer):
    tokenizer.model_max_length = 4
    assert tokenize("two answers", tokenizer)["length"] > 4
    assert not tokenizer.deprecation_warnings  # where transformers notes that it has said so
    tokenizer("a b c d e f g h")
    assert tokenizer.deprecation_warnings


@pytest.mark.parametrize("named", [False, True])
def test_a_tokenizers_template_that_is_no_jinja_ends_with_one_line(named, tokenizer, capsys):
    tokenizer.chat_template = "{% for m in messages %}\n{{ m.content }"
    if named:
        tokenizer.chat_template = {"default": "", "tool_use": tokenizer.chat_template}
    with pytest.raises(SystemExit, match="64"):
        check_own_template(tokenizer, "runs/model")
    (line,) = capsys.readouterr().err.splitlines()
    assert "runs/model" in line and "line 2" in line
