# SPDX-License-Identifier: Apache-2.0
"""What check_server.py does with its command line, before and after it asks a server."""

import json
from functools import partial

import pytest

import check_server as command
from adapter_folders import make_base
from calling import call
from chat_server import completion
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


def test_the_verdict_is_written_although_the_server_differs(check, base, tmp_path):
    code, _ = check(base / "model", "--model", "mine", "--json", tmp_path / "verdict.json")
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert code == 76 and not verdict["passed"] and verdict["prompts"] == 3
    assert [answer["server"] for answer in verdict["answers"]] == [" a b"] * 3


def test_rows_with_tools_are_left_out(check, base, stand_in, tmp_path):
    rows = tmp_path / "rows.jsonl"
    plain = {"messages": [USER, SAID]}
    with_tools = {**plain, "tools": [{"type": "function", "function": {"name": "f"}}]}
    rows.write_text("\n".join(json.dumps(row) for row in (with_tools, plain)))
    stand_in.body = json.dumps(completion()).encode()
    check(base / "model", "--model", "mine", "--prompts", rows)
    assert stand_in.questions[1]["messages"] == [USER]
