# SPDX-License-Identifier: Apache-2.0
"""Messages in any of the usual forms become the one that chat templates take."""

import json

import pytest

from components.messages import normalize_message, normalize_tools, pop_weight

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
FUNCTION = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}


def normalize(**message):
    return normalize_message(message, 2)


def by_assistant(**keys):
    return normalize(role="assistant", **keys)


# ---- Content ----
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        ("", ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"text": "a"}, "b"], "a\nb"),
        ([{"type": None, "text": "a"}], "a"),
        ([], ""),
    ],
)
def test_content_becomes_one_text(content, text):
    assert by_assistant(content=content)["content"] == text


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("a", "message 2"),
        ({"content": "a"}, "role"),
        ({"role": "user"}, "no content"),
        ({"role": "user", "content": None}, "null"),
        ({"role": "user", "content": 5}, "5"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "image_url"),
    ],
    ids=str,
)
def test_a_message_without_a_text_says_why(message, word):
    with pytest.raises(ValueError, match=word):
        normalize_message(message, 2)


def test_what_readers_of_tables_fill_in_is_as_if_absent():
    filled = by_assistant(content="a", name=None, tool_calls=[], function_call=None, id="x")
    assert filled == {"role": "assistant", "content": "a", "id": "x"}


# ---- Reasoning ----
@pytest.mark.parametrize("key", ["thoughts", "thought"])
def test_names_of_reasoning_that_transformers_does_not_know_get_one_that_it_knows(key):
    assert by_assistant(content="a", **{key: "hm"})["reasoning_content"] == "hm"


# ---- Calls of tools ----
@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": CALL["function"]}],
        [CALL["function"]],
        [{"name": "weather", "arguments": '{"city": "Rome"}'}],
        [{"name": "weather", "parameters": {"city": "Rome"}}],
        [{"name": "weather", "arguments": None, "parameters": {"city": "Rome"}}],
        [{"name": "weather", "args": {"city": "Rome"}}],
        [{"name": "weather", "input": {"city": "Rome"}}],
        [{"function": {"name": "weather", "arguments": {"city": "Rome", "country": None}}}],
        json.dumps([CALL]),
        [json.dumps(CALL)],
        CALL,
    ],
    ids=json.dumps,
)
def test_calls_in_all_forms_are_the_same(calls):
    assert by_assistant(content=None, tool_calls=calls)["tool_calls"] == [CALL]


def test_the_older_form_of_a_call_and_its_result_is_read_too():
    message = by_assistant(content=None, function_call=CALL["function"])
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}
    result = normalize(role="function", name="weather", content="Sun")
    assert result == {"role": "tool", "name": "weather", "content": "Sun"}


@pytest.mark.parametrize(
    "calls",
    [
        5,
        "weather",
        ["weather"],
        [{}],
        [{"name": 5}],
        [{"name": "a", "kwargs": {"b": 1}}],
        [{"name": "a", "arguments": "{"}],
        [[CALL]],
    ],
    ids=json.dumps,
)
def test_calls_without_a_name_or_with_torn_arguments_are_refused(calls):
    with pytest.raises(ValueError, match="message 2"):
        by_assistant(content=None, tool_calls=calls)


@pytest.mark.parametrize(
    "keys",
    [
        {"tool_calls": [CALL], "function_call": CALL["function"]},
        {"reasoning_content": "hm", "thoughts": "aha"},
    ],
    ids=["calls", "reasoning"],
)
def test_what_is_said_twice_is_refused_rather_than_dropped(keys):
    with pytest.raises(ValueError, match="leave"):
        by_assistant(content="a", **keys)


# ---- Tools ----
@pytest.mark.parametrize(
    "tools",
    [[TOOL], [FUNCTION], json.dumps([TOOL]), [json.dumps(FUNCTION)], [TOOL | {"strict": None}]],
    ids=json.dumps,
)
def test_tools_in_all_forms_are_the_same(tools):
    assert normalize_tools(tools) == [TOOL]


def test_a_null_is_kept_in_tools_that_are_json_and_is_none_in_those_of_a_reader():
    parameters = {"type": "object", "properties": {"unit": {"type": "string", "default": None}}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    for tools in (json.dumps([tool]), [json.dumps(tool)]):
        assert normalize_tools(tools) == [tool]
    (read,) = normalize_tools([tool])
    assert read["function"]["parameters"]["properties"]["unit"] == {"type": "string"}


@pytest.mark.parametrize("tools", [5, "weather", ["weather"], [{}], [{"function": 5}]], ids=str)
def test_tools_without_a_name_are_refused(tools):
    with pytest.raises(ValueError, match="tools"):
        normalize_tools(tools)


# ---- Weights ----
@pytest.mark.parametrize(
    ("role", "keys", "is_trained_on"),
    [
        ("assistant", {}, True),
        ("assistant", {"weight": 1}, True),
        ("assistant", {"weight": 0}, False),
        ("assistant", {"train": False}, False),
        ("assistant", {"loss": True}, True),
        ("user", {}, False),
        ("user", {"weight": 0}, False),
        ("tool", {"train": False}, False),
    ],
)
def test_only_what_the_assistant_says_is_trained_on_unless_it_is_left_out(
    role, keys, is_trained_on
):
    message = {"role": role, "content": "a", **keys}
    assert pop_weight(message, "message 1") == is_trained_on
    assert message == {"role": role, "content": "a"}


@pytest.mark.parametrize(
    ("role", "keys"),
    [("assistant", {"weight": 0.5}), ("assistant", {"train": "no"}), ("user", {"train": True})],
)
def test_other_weights_are_refused(role, keys):
    with pytest.raises(ValueError, match=r"has to be 0|only what the assistant"):
        pop_weight({"role": role, "content": "a", **keys}, "message 1")


# ---- ShareGPT ----
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"from": "human", "value": "a"}, {"role": "user", "content": "a"}),
        ({"from": "gpt", "value": "a", "weight": 0}, None),
        ({"from": "system", "value": "a"}, {"role": "system", "content": "a"}),
        ({"from": "observation", "value": "a"}, {"role": "tool", "content": "a"}),
        (
            {"from": "function_call", "value": json.dumps(CALL["function"])},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
        ),
    ],
    ids=str,
)
def test_messages_of_sharegpt_are_read(message, expected):
    expected = expected or {"role": "assistant", "content": "a", "weight": 0}
    assert normalize_message(message, 1) == expected
