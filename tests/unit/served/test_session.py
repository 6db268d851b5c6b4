# SPDX-License-Identifier: Apache-2.0
"""What check_server.py does with its command line, before and after it asks a server."""

import json
from functools import partial

import pytest

import check_server as command
from adapter_folders import make_base
from calling import call
from chat_server import completion
from components.conversations import Conversation
from served import session

USER = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}


@pytest.fixture(scope="module")
def base(once):
    return once("served_base", make_base)


@pytest.fixture
def check(monkeypatch, capsys, stand_in):
    """A function from words of a command line to (exit code, what was printed)."""

    url = f"http://127.0.0.1:{stand_in.server_port}"
    defaults = ["--url", url, "--num_prompts", "3", "--device", "cpu"]
    return partial(call, monkeypatch, capsys, command, session, *defaults)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--bound", "-1"], "--bound must be above 0"),
        (["--max_new_tokens", "0"], "--max_new_tokens must be at least 1"),
        (["--url", "localhost"], "--url localhost: not an address"),
        (["--device", "tpu:9"], "--device tpu:9"),
    ],
)
def test_a_wrong_flag_ends_with_64_before_a_server_is_asked(words, says, check, base, stand_in):
    code, printed = check(base / "model", *words)
    (line,) = printed.splitlines()
    assert code == 64 and says in line and not stand_in.keys


def test_the_only_model_that_a_server_lists_is_asked(check, base, stand_in):
    stand_in.models = ["only"]
    code, printed = check(base / "model")
    assert code == 76 and "tokens of prompt 1" in printed and "(and 1 more problems)" in printed
    assert len(stand_in.questions) == 1 + 3
    assert {question["model"] for question in stand_in.questions} == {"only"}
    assert stand_in.questions[0]["max_tokens"] == 1


@pytest.mark.parametrize(("models", "says"), [([], "none"), (["one", "two"], "one, two")])
def test_of_several_models_one_has_to_be_named(models, says, check, base, stand_in):
    stand_in.models = models
    code, printed = check(base / "model")
    (line,) = printed.splitlines()
    assert code == 64 and f": {says}; name --model" in line and not stand_in.questions


def test_the_verdict_is_written_although_the_server_differs(check, base, tmp_path):
    code, _ = check(base / "model", "--model", "mine", "--json", tmp_path / "verdict.json")
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert code == 76 and not verdict["passed"] and verdict["prompts"] == 3
    assert [answer["server"] for answer in verdict["answers"]] == [" a b"] * 3


def test_a_server_that_fails_between_two_questions_ends_with_69(check, base, stand_in, monkeypatch):
    ask = session.ask_all

    def fail_first(*arguments):
        stand_in.status = 500
        return ask(*arguments)

    monkeypatch.setattr(session, "ask_all", fail_first)
    code, printed = check(base / "model", "--model", "mine")
    (line,) = printed.splitlines()
    assert code == 69 and "answers with 500" in line


def test_a_model_without_a_chat_template_is_refused(check, tmp_path, base, stand_in):
    model = make_base(tmp_path / "text") / "model"
    (model / "chat_template.jinja").unlink()
    code, printed = check(model, "--model", "mine")
    (line,) = [line for line in printed.splitlines() if line.startswith("error: ")]
    assert code == 65 and "has no chat template" in line


def test_a_file_that_cannot_be_written_is_known_before_a_server_is_asked(check, base, stand_in):
    code, _ = check(base / "model", "--json", "/nowhere/verdict.json")
    assert code == 73 and not stand_in.keys


@pytest.mark.parametrize(
    ("messages", "tools", "is_plain"),
    [
        ([USER, SAID, USER], [], True),
        ([{"role": "system", "content": "c"}, USER], [], True),
        ([USER], [{"type": "function"}], False),
        ([USER, {**SAID, "tool_calls": []}, USER], [], False),
        ([USER, {**SAID, "reasoning_content": "d"}, USER], [], False),
        ([{"role": "developer", "content": "c"}, USER], [], False),
    ],
)
def test_only_texts_by_roles_that_every_server_knows_are_asked(messages, tools, is_plain):
    conversation = Conversation(messages, tools, [False] * len(messages))
    assert session.is_plain(conversation) == is_plain


def test_rows_with_tools_are_left_out(check, base, stand_in, tmp_path):
    rows = tmp_path / "rows.jsonl"
    plain = {"messages": [USER, SAID]}
    with_tools = {**plain, "tools": [{"type": "function", "function": {"name": "f"}}]}
    rows.write_text("\n".join(json.dumps(row) for row in (with_tools, plain)))
    stand_in.body = json.dumps(completion()).encode()
    check(base / "model", "--model", "mine", "--prompts", rows)
    assert stand_in.questions[1]["messages"] == [USER]


def test_a_file_with_rows_of_tools_only_is_refused_by_what_it_lacks(
    check, base, stand_in, tmp_path
):
    rows = tmp_path / "rows.jsonl"
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows.write_text(json.dumps({"messages": [USER, SAID], "tools": tools}))
    code, printed = check(base / "model", "--model", "mine", "--prompts", rows)
    line = printed.splitlines()[-1]
    assert code == 65 and line.startswith(f"error: {rows}: no rows of at most ")
    assert line.endswith(" tokens and without tools, reasoning or parts of text")
