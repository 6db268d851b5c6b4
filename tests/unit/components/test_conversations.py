# SPDX-License-Identifier: Apache-2.0
"""A conversation that would be trained on wrongly is refused, with its cause; others are not."""

import json
import re

import pytest
from transformers import AutoTokenizer

from components.columns import TrackedRow
from components.conversations import (
    find_messages,
    trains_on_answers_only,
    validate_conversation,
    validate_message_keys,
    validate_pair,
)
from row_files import TURNS_OF_A_PAIR

FORMATS = {"prompt": "completion", "instruction": "output", "question": "answer"}
QUESTION = "Spell the word lamp."
ANSWER = "l-a-m-p"
MESSAGES = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
CALL = [{"function": {"name": "spell", "arguments": {"word": "lamp"}}}]
SAME_CONVERSATION = {
    "prompt, completion": {"prompt": QUESTION, "completion": ANSWER},
    "question, answer": {"question": QUESTION, "answer": ANSWER},
    "instruction, output": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "messages": {"messages": MESSAGES},
    "prompt and completion as messages": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "columns that are not used": {
        "prompt": QUESTION,
        "completion": ANSWER,
        "skill": "spell",
        "messages": None,
    },
}
WRITES_REASONING = (
    "{% for turn in messages %}{{ '<|' + turn['role'] + '|>' }}"
    "{% if turn.reasoning_content %}{{ '(' + turn.reasoning_content + ') ' }}{% endif %}"
    "{{ turn['content'] + '<|end_of_turn|>' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


def conversation_of(row, tokenizer):
    """Return the messages of a row, with all checks."""
    messages = validate_conversation(find_messages(row, FORMATS), row, FORMATS)
    validate_message_keys(row, messages, tokenizer)
    return messages


def with_answer(content=ANSWER, before=(), **keys):
    """Return a row with a conversation whose answer has more keys than role and content."""
    answer = {"role": "assistant", "content": content, **keys}
    return {"messages": [MESSAGES[0], *before, answer]}


# ---- Where messages are found ----
@pytest.mark.parametrize("name", SAME_CONVERSATION)
def test_all_formats_are_the_same_conversation(name, tokenizer):
    assert conversation_of(SAME_CONVERSATION[name], tokenizer) == MESSAGES


def test_the_input_of_an_instruction_follows_it(tokenizer):
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert find_messages(row, FORMATS)[0]["content"] == "Add.\n\n1 and 2"


def test_the_first_format_whose_columns_are_there_counts():
    row = {"prompt": 5, "question": "a", "answer": "b"}
    assert find_messages(row, FORMATS)[0]["content"] == "a"
    assert find_messages({"prompt": "a"}, FORMATS) is None


# ---- What a conversation must be ----
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "has the columns text; needs messages | prompt, completion"),
        (
            {"prompt": "a", "completion": 5},
            "message 2 (assistant) has no text: its content is 5; content has",
        ),
        ({"prompt": None, "completion": "b"}, "message 1 (user) has no text: its content is null"),
        ({"prompt": "a", "completion": ""}, "no answer to train on"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer to train on"),
        ({"messages": [{"role": "user"}]}, "message 1 (user) has no text: it has no content"),
        ({"messages": ["a"]}, "message 1 is not an object with role and content"),
        (
            {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "conversations has from and value (ShareGPT): rename them to role and content, and "
            "write user for human",
        ),
        (
            {"messages": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
            "message 1 has from and value (ShareGPT): rename them to role and content",
        ),
        ({"messages": []}, "no answer to train on after a user's text: its texts are by nobody"),
        ({"messages": MESSAGES[1:] + MESSAGES}, "its texts are by assistant, user, assistant"),
    ],
    ids=json.dumps,
)
def test_rows_that_cannot_be_used_say_why(row, says, tokenizer):
    with pytest.raises(ValueError, match=re.escape(says)):
        conversation_of(row, tokenizer)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            with_answer() | {"tools": [{"name": "spell"}]},
            "has tools, which this recipe does not pass to the chat",
        ),
        (with_answer() | {"functions": '[{"name": "spell"}]'}, "has functions, which"),
        (
            with_answer("", tool_calls=CALL),
            "message 2 (assistant) has tool_calls, and tool calls are not",
        ),
        (
            with_answer(None, tool_calls=CALL),
            "message 2 (assistant) has tool_calls, and tool calls are not",
        ),
        (with_answer(function_call=CALL[0]), "message 2 (assistant) has function_call"),
        (
            with_answer(before=[{"role": "tool", "content": "5"}]),
            "message 2 (tool) has the role of a tool",
        ),
        (
            with_answer([{"type": "text", "text": "a"}]),
            "message 2 (assistant) has no text: its content is a list of 1 part",
        ),
        (with_answer(None), "message 2 (assistant) has no text: its content is null"),
        (
            with_answer(reasoning_content="l, a, m, p"),
            "message 2 (assistant) has reasoning_content, which the chat template drops",
        ),
        (
            with_answer(name="Ann", thinking="hm"),
            "has name, thinking, which the chat template drops",
        ),
        (with_answer(weight=0), "has weight 0, but what the assistant says is trained on"),
        (
            with_answer(before=[{"role": "user", "content": "b", "train": True}]),
            "what the user says is not trained on",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_trained_on_wrongly_is_refused(row, says, tokenizer):
    with pytest.raises(ValueError, match=re.escape(says)):
        conversation_of(row, tokenizer)


@pytest.mark.parametrize(
    "row",
    [
        with_answer() | {"tools": None},
        with_answer() | {"tools": "[]"},
        with_answer(tool_calls=[]),
        with_answer(tool_calls=None, reasoning_content="", name=None),
        with_answer(weight=1),
        with_answer(id="x7", timestamp=12),
    ],
    ids=str,
)
def test_what_is_null_empty_or_only_describes_a_message_is_as_if_absent(row, tokenizer):
    said = [(message["role"], message["content"]) for message in conversation_of(row, tokenizer)]
    assert said == [("user", QUESTION), ("assistant", ANSWER)]


# ---- Keys of messages ----
def test_a_key_that_the_template_writes_is_kept(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", WRITES_REASONING)
    row = with_answer(reasoning_content="hm", id="x7")
    assert conversation_of(row, tokenizer)[1]["reasoning_content"] == "hm"
    with pytest.raises(ValueError, match="has name, which the chat template drops"):
        conversation_of(with_answer(reasoning_content="hm", name="Ann"), tokenizer)


def test_a_template_that_needs_a_key_uses_it(tokenizer, monkeypatch):
    template = "{{ messages[1].name.upper() + messages[1].content }}"
    monkeypatch.setattr(tokenizer, "chat_template", template)
    conversation_of(with_answer(name="Ann"), tokenizer)


def test_dropped_keys_that_describe_a_message_are_noted_in_the_row(tokenizer):
    row = TrackedRow(with_answer(id="x7", timestamp=12) | {"source": "web"})
    conversation_of(row, tokenizer)
    assert row.unread() == ["id (of messages)", "timestamp (of messages)", "source"]


# ---- Pairs ----
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"},
        {"chosen": "1 + 1 = 2", "rejected": "1 + 1 = 3"},
        TURNS_OF_A_PAIR,
        {"chosen": MESSAGES, "rejected": MESSAGES},
        {"prompt": QUESTION, "chosen": MESSAGES, "rejected": MESSAGES},
    ],
    ids=["texts", "texts with the prompt", "messages", "messages with the prompt", "both"],
)
def test_pairs_of_one_kind_are_returned(row):
    assert validate_pair(row) == (row.get("prompt"), row["chosen"], row["rejected"])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            {"prompt": "a", "chosen": "b"},
            "has the columns prompt, chosen; needs chosen and rejected",
        ),
        (
            {"question": "a", "answer": "b"},
            "has the columns question, answer; needs chosen and rejected",
        ),
        (TURNS_OF_A_PAIR | {"rejected": "b"}, "both texts or both lists"),
        ({"prompt": MESSAGES[:1], "chosen": "a", "rejected": "b"}, "prompt, of the same kind"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "has no text in rejected"),
        (
            TURNS_OF_A_PAIR | {"chosen": [{"role": "assistant", "content": ""}]},
            "has no answer to train on",
        ),
        (TURNS_OF_A_PAIR | {"chosen": [{"role": "assistant", "content": None}]}, "has no text"),
        (
            {"prompt": MESSAGES, "chosen": [], "rejected": []},
            "has no text in chosen",
        ),
        ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": ["t"]}, "has tools"),
    ],
)
def test_pairs_that_cannot_be_compared_say_why(row, says):
    with pytest.raises(ValueError, match=says):
        validate_pair(row)


@pytest.mark.parametrize("keys", [{"tool_calls": CALL}, {"weight": 0.5}], ids=str)
def test_preferences_are_checked_like_conversations(keys):
    rejected = {"role": "assistant", "content": "bad"} | keys
    row = TURNS_OF_A_PAIR | {"rejected": [rejected]}
    with pytest.raises(ValueError, match="message 2 .assistant. has " + next(iter(keys))):
        validate_pair(row)


@pytest.mark.parametrize(("completion", "assistant"), [(True, False), (False, True)])
def test_which_tokens_are_trained_on_depends_on_the_form_of_the_row(completion, assistant):
    pair = {"prompt": "a", "completion": "b"}
    messages = {"messages": [{"role": "user", "content": "a"}]}
    assert trains_on_answers_only(pair, None, completion, assistant) == completion
    assert trains_on_answers_only(messages, None, completion, assistant) == assistant
