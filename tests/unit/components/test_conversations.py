# SPDX-License-Identifier: Apache-2.0
"""Rows in all their formats become conversations; one without an answer to train on says why."""

import json

import pytest

from components.conversations import (
    find_messages,
    find_tools,
    make_conversation,
    read_conversation,
    read_pair,
    trains_on_answers_only,
)
from row_files import TURNS_OF_A_PAIR

FORMATS = {"prompt": "completion", "instruction": "output", "question": "answer"}
QUESTION = "Spell the word lamp."
ANSWER = "l-a-m-p"
MESSAGES = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
CALL = [{"function": {"name": "spell", "arguments": {"word": "lamp"}}}]
TOOL = {"type": "function", "function": {"name": "spell"}}
SYSTEM = {"role": "system", "content": "Be brief."}
SHAREGPT = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]
SAME_CONVERSATION = {
    "prompt, completion": {"prompt": QUESTION, "completion": ANSWER},
    "question, answer": {"question": QUESTION, "answer": ANSWER},
    "instruction, output": {"instruction": QUESTION, "input": "", "output": ANSWER},
    "messages": {"messages": MESSAGES},
    "prompt and completion as messages": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "prompt as messages": {"prompt": MESSAGES[:1], "completion": ANSWER},
    "completion as messages": {"prompt": QUESTION, "completion": MESSAGES[1:]},
    "ShareGPT": {"conversations": SHAREGPT},
    "ShareGPT in messages": {"messages": SHAREGPT},
    "conversations with roles": {"conversations": MESSAGES},
    "columns that are not used": {
        "prompt": QUESTION,
        "completion": ANSWER,
        "skill": "spell",
        "messages": None,
    },
}


def read(row, columns=None):
    return read_conversation(row, FORMATS, columns)


def with_answer(content=ANSWER, before=(), **keys):
    """Return a row with a conversation whose answer has more keys than role and content."""
    answer = {"role": "assistant", "content": content, **keys}
    return {"messages": [MESSAGES[0], *before, answer]}


# ---- Where messages are found ----
@pytest.mark.parametrize("name", SAME_CONVERSATION)
def test_all_formats_are_the_same_conversation(name):
    conversation = read(SAME_CONVERSATION[name])
    assert conversation.messages == MESSAGES
    assert conversation.is_trained_on == [False, True]


def test_the_input_of_an_instruction_follows_it():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert find_messages(row, FORMATS)[0]["content"] == "Add.\n\n1 and 2"


def test_the_first_format_whose_columns_are_there_counts():
    row = {"prompt": 5, "question": "a", "answer": "b"}
    assert find_messages(row, FORMATS)[0]["content"] == "a"
    assert find_messages({"prompt": "a"}, FORMATS) is None


@pytest.mark.parametrize("row", [{"messages": MESSAGES}, {"question": QUESTION, "answer": ANSWER}])
def test_a_system_text_in_its_own_column_comes_first(row):
    assert read(row | {"system": "Be brief."}).messages == [SYSTEM, *MESSAGES]


def test_columns_name_the_system_text_and_the_tools_of_any_format():
    row = {"chat": MESSAGES, "rules": "Be brief.", "api": [TOOL]}
    columns = {"messages": "chat", "system": "rules", "tools": "api"}
    conversation = read(row, columns)
    assert conversation.messages == [SYSTEM, *MESSAGES] and conversation.tools == [TOOL]
    row = {"conversations": SHAREGPT, "api": [TOOL]}
    assert read(row, {"tools": "api"}).tools == [TOOL]


# ---- Tools ----
@pytest.mark.parametrize("column", ["tools", "functions"])
def test_tools_are_read_from_a_column(column):
    assert find_tools({column: json.dumps([TOOL["function"]])}) == [TOOL]


# ---- What a conversation must be ----
@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"text": "a"}, "has the columns text"),
        ({"prompt": "a", "completion": 5}, "message 2"),
        ({"prompt": None, "completion": "b"}, "message 1"),
        ({"prompt": "a", "completion": ""}, "no answer"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer"),
        ({"messages": ["a"]}, "message 1"),
        ({"messages": MESSAGES[1:] + MESSAGES}, "assistant, user, assistant"),
        ({"messages": [{"role": "human", "content": "a"}]}, "human"),
        ({"instruction": "Add.", "input": 0, "output": "3"}, "input"),
        ({"chat": SHAREGPT}, "--columns"),
        (with_answer(weight=0), "weight 0"),
        (with_answer(" ", before=[MESSAGES[1], MESSAGES[0]]), "message 4"),
    ],
    ids=json.dumps,
)
def test_rows_that_cannot_be_used_say_why(row, word):
    with pytest.raises(ValueError, match=word):
        read(row)


@pytest.mark.parametrize("said", [{"tool_calls": CALL}, {"reasoning_content": "hm"}], ids=str)
def test_an_answer_may_be_a_call_or_reasoning(said):
    assert read(with_answer(None, **said)).is_trained_on == [False, True]


# ---- What is trained on ----
def test_a_weight_of_0_leaves_an_answer_out():
    answer = MESSAGES[1]
    row = {"messages": [MESSAGES[0], answer | {"weight": 0}, MESSAGES[0], answer | {"weight": 1}]}
    conversation = read(row)
    assert conversation.is_trained_on == [False, False, False, True]
    assert conversation.messages == MESSAGES * 2


def test_answers_in_a_prompt_are_not_trained_on():
    row = {"prompt": [*MESSAGES, MESSAGES[0]], "completion": [MESSAGES[1]]}
    assert read(row).is_trained_on == [False, False, False, True]
    row = {"prompt": [*SHAREGPT, SHAREGPT[0]], "completion": ANSWER}
    assert read(row).is_trained_on == [False, False, False, True]


def test_the_last_answer_can_be_the_only_one():
    conversation = make_conversation([*MESSAGES, *MESSAGES, MESSAGES[0]], tools=[])
    last = conversation.with_last_answer_only()
    assert conversation.is_trained_on == [False, True, False, True, False]
    assert last.is_trained_on == [False, False, False, True, False]


def test_a_last_answer_of_weight_0_cannot_be_the_only_one():
    last = MESSAGES[1] | {"weight": 0}
    conversation = make_conversation([*MESSAGES, MESSAGES[0], last], tools=[])
    with pytest.raises(ValueError, match="weight 0 on its last answer"):
        conversation.with_last_answer_only()


@pytest.mark.parametrize(
    ("row", "columns", "expected"),
    [
        ({"messages": MESSAGES}, None, "assistant_only_loss"),
        ({"conversations": SHAREGPT}, None, "assistant_only_loss"),
        ({"prompt": "a", "completion": "b"}, None, "completion_only_loss"),
        ({"messages": None, "prompt": "a", "completion": "b"}, None, "completion_only_loss"),
        ({"chat": MESSAGES}, {"messages": "chat"}, "assistant_only_loss"),
        (
            {"messages": MESSAGES, "q": "a", "a": "b"},
            {"prompt": "q", "completion": "a"},
            "completion_only_loss",
        ),
        (
            {"messages": MESSAGES, "rules": "a"},
            {"system": "rules"},
            "assistant_only_loss",
        ),
    ],
    ids=json.dumps,
)
def test_each_kind_of_row_has_its_own_flag(row, columns, expected):
    for completion, assistant in ((True, False), (False, True)):
        flags = {"completion_only_loss": completion, "assistant_only_loss": assistant}
        assert trains_on_answers_only(row, columns, **flags) == flags[expected]


LEFT_OUT = [MESSAGES[0], MESSAGES[1] | {"weight": 0}]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"messages": LEFT_OUT * 2}, "weight 0 in message 2 of messages"),
        ({"messages": [MESSAGES[0] | {"train": False}, MESSAGES[1]]}, "train False in message 1"),
        (
            {"conversations": [SHAREGPT[0], SHAREGPT[1] | {"loss": 0}]},
            "loss 0 in message 2 of",
        ),
        ({"prompt": "a", "completion": [LEFT_OUT[1]]}, "weight 0 in message 1 of completion"),
    ],
    ids=json.dumps,
)
def test_a_weight_of_0_is_refused_where_everything_is_trained_on(row, says):
    flags = {"completion_only_loss": False, "assistant_only_loss": False}
    with pytest.raises(ValueError, match=f"has {says}.*: leave out --no_"):
        trains_on_answers_only(row, None, **flags)
    answers_only = {"completion_only_loss": True, "assistant_only_loss": True}
    assert trains_on_answers_only(row, None, **answers_only)


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
    assert read_pair(row) == (row.get("prompt"), row["chosen"], row["rejected"])


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"prompt": "a", "chosen": "b"}, "rejected"),
        (TURNS_OF_A_PAIR | {"rejected": "b"}, "both"),
        ({"prompt": MESSAGES[:1], "chosen": "a", "rejected": "b"}, "prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "rejected"),
        (TURNS_OF_A_PAIR | {"chosen": [{"role": "assistant", "content": ""}]}, "message 2"),
        (TURNS_OF_A_PAIR | {"chosen": MESSAGES[:1]}, "no answer"),
        ({"prompt": MESSAGES, "chosen": [], "rejected": []}, "chosen"),
        (TURNS_OF_A_PAIR | {"rejected": [MESSAGES[1] | {"weight": 0}]}, "weight 0"),
    ],
    ids=json.dumps,
)
def test_pairs_that_cannot_be_compared_say_why(row, word):
    with pytest.raises(ValueError, match=word):
        read_pair(row)
