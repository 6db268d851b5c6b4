# SPDX-License-Identifier: Apache-2.0
"""Rows in all their formats become conversations; one without an answer to train on says why."""

import json

import pytest

from core.chat import find_tools, read_conversation, read_message

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
    "columns that are not used": {
        "prompt": QUESTION,
        "completion": ANSWER,
        "skill": "spell",
        "messages": None,
    },
}


def read(row, columns=None):
    return read_conversation(row, FORMATS, columns)


def with_answer(content=ANSWER, **keys):
    """Return a row with a conversation whose answer has more keys than role and content."""
    answer = {"role": "assistant", "content": content, **keys}
    return {"messages": [MESSAGES[0], answer]}


# ---- Where messages are found ----
@pytest.mark.parametrize("name", SAME_CONVERSATION)
def test_all_formats_are_the_same_conversation(name):
    conversation = read(SAME_CONVERSATION[name])
    assert conversation.messages == MESSAGES
    assert conversation.is_trained_on == [False, True]


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


@pytest.mark.parametrize("said", [{"tool_calls": CALL}, {"reasoning_content": "hm"}], ids=str)
def test_an_answer_may_be_a_call_or_reasoning(said):
    assert read(with_answer(None, **said)).is_trained_on == [False, True]


# ---- What is trained on ----
def test_answers_in_a_prompt_are_not_trained_on():
    row = {"prompt": [*MESSAGES, MESSAGES[0]], "completion": [MESSAGES[1]]}
    assert read(row).is_trained_on == [False, False, False, True]
    row = {"prompt": [*SHAREGPT, SHAREGPT[0]], "completion": ANSWER}
    assert read(row).is_trained_on == [False, False, False, True]


def test_the_assistant_may_speak_first_behind_a_system_message():
    said = [{"role": "system", "content": "Be kind."}, {"role": "assistant", "content": "Hello!"}]
    assert read({"messages": [*said, *MESSAGES]}).is_trained_on == [False, True, False, True]


@pytest.mark.parametrize(
    ("row", "columns", "is_pair"),
    [
        ({"messages": MESSAGES}, None, False),
        ({"conversations": SHAREGPT}, None, False),
        ({"prompt": "a", "completion": "b"}, None, True),
        ({"messages": None, "prompt": "a", "completion": "b"}, None, True),
        ({"chat": MESSAGES}, {"messages": "chat"}, False),
        ({"messages": MESSAGES, "q": "a", "a": "b"}, {"prompt": "q", "completion": "a"}, True),
        ({"messages": MESSAGES, "rules": "a"}, {"system": "rules"}, False),
    ],
    ids=json.dumps,
)
def test_a_question_and_its_answer_are_told_from_messages(row, columns, is_pair):
    assert read(row, columns).is_pair == is_pair


# ---- Messages ----
WEATHER_CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
WEATHER_TOOL = {"type": "function", "function": FUNCTION}


def normalize(**message):
    return read_message(message, 2)[0]


def by_assistant(**keys):
    return normalize(role="assistant", **keys)


# ---- Content ----
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"text": "a"}, "b"], "a\nb"),
        ([{"type": None, "text": "a"}], "a"),
        ([], ""),
    ],
)
def test_content_becomes_one_text(content, text):
    assert by_assistant(content=content)["content"] == text


# ---- Calls of tools ----
@pytest.mark.parametrize(
    "calls",
    [
        [WEATHER_CALL],
        [{"function": WEATHER_CALL["function"]}],
        [WEATHER_CALL["function"]],
        [{"name": "weather", "arguments": '{"city": "Rome"}'}],
        [{"name": "weather", "arguments": None, "parameters": {"city": "Rome"}}],
        [{"name": "weather", "args": {"city": "Rome"}}],
        [{"name": "weather", "input": {"city": "Rome"}}],
        [{"function": {"name": "weather", "arguments": {"city": "Rome", "country": None}}}],
        json.dumps([WEATHER_CALL]),
        [json.dumps(WEATHER_CALL)],
        WEATHER_CALL,
    ],
    ids=json.dumps,
)
def test_calls_in_all_forms_are_the_same(calls):
    assert by_assistant(content=None, tool_calls=calls)["tool_calls"] == [WEATHER_CALL]


def test_the_older_form_of_a_call_and_its_result_is_read_too():
    message = by_assistant(content=None, function_call=WEATHER_CALL["function"])
    assert message == {"role": "assistant", "content": "", "tool_calls": [WEATHER_CALL]}
    result = normalize(role="function", name="weather", content="Sun")
    assert result == {"role": "tool", "name": "weather", "content": "Sun"}


# ---- Tools ----
@pytest.mark.parametrize(
    "tools",
    [
        [WEATHER_TOOL],
        [FUNCTION],
        json.dumps([WEATHER_TOOL]),
        [json.dumps(FUNCTION)],
        [WEATHER_TOOL | {"strict": None}],
    ],
    ids=json.dumps,
)
def test_tools_in_all_forms_are_the_same(tools):
    assert find_tools({"tools": tools}) == [WEATHER_TOOL]


def test_a_null_is_kept_in_tools_that_are_json_and_is_none_in_those_of_a_reader():
    parameters = {"type": "object", "properties": {"unit": {"type": "string", "default": None}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    for tools in (json.dumps([tool]), [json.dumps(tool)]):
        assert find_tools({"tools": tools}) == [tool]
    (read,) = find_tools({"tools": [tool]})
    assert read["function"]["parameters"]["properties"]["unit"] == {"type": "string"}


# ---- Weights ----
@pytest.mark.parametrize(
    ("role", "keys", "weight"),
    [
        ("assistant", {}, True),
        ("assistant", {"weight": 0}, False),
        ("assistant", {"train": False}, False),
        ("assistant", {"loss": True}, True),
        ("user", {}, False),
        ("user", {"weight": 0}, False),
        ("tool", {"train": False}, False),
    ],
)
def test_a_message_says_whether_it_is_trained_on(role, keys, weight):
    message = {"role": role, "content": "a"}
    assert read_message({**message, **keys}, 1) == (message, weight)


# ---- ShareGPT ----
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"from": "system", "value": "a"}, {"role": "system", "content": "a"}),
        ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
        (
            {"from": "function_call", "value": json.dumps(WEATHER_CALL["function"])},
            {"role": "assistant", "content": "", "tool_calls": [WEATHER_CALL]},
        ),
    ],
    ids=str,
)
def test_messages_of_sharegpt_are_read(message, expected):
    assert read_message(message, 1)[0] == expected
