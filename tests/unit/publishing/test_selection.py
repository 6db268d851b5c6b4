# SPDX-License-Identifier: Apache-2.0
"""What is pushed of a folder, and which folders are refused in one line."""

import json

import pytest

from publishing import selection, session


@pytest.fixture
def result(tmp_path):
    """A folder with a result, and with what stays on the machine."""
    (tmp_path / "checkpoint-10").mkdir()
    for name in ("model.safetensors", "config.json", "run.json", "checkpoint-10/state.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "status.json").write_text(json.dumps({"state": "done"}))
    return tmp_path


def refused(capsys, code, words, function, *arguments):
    """Check that a call ends with a code and one line that has these words."""
    with pytest.raises(SystemExit) as ended:
        function(*arguments)
    printed = capsys.readouterr().err
    assert ended.value.code == code and printed.count("\n") == 1
    assert words in printed


def test_what_belongs_to_the_machine_stays_there(result):
    chosen, left_out = selection.select(result)
    assert sorted(chosen) == ["config.json", "model.safetensors"]
    assert left_out == ["checkpoint-10", "run.json", "status.json"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"state": "failed"}'])
def test_a_run_that_is_not_known_to_be_done_is_refused(content, result):
    (result / "status.json").write_text(content)
    assert "not done" in selection.find_unfinished(result)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("README.md", "hf_" + "a" * 30, "secret"),
        ("config.json", "-----BEGIN PRIVATE KEY-----", "secret"),
    ],
)
def test_secrets_in_what_is_pushed_are_refused(name, content, words, result):
    (result / name).write_text(content)
    assert words in selection.find_unsafe(result, [name])


@pytest.mark.parametrize(
    ("answer", "agrees"), [("y", True), ("YES", True), ("", False), ("n", False)]
)
def test_only_a_yes_is_consent(answer, agrees, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda question: answer)
    assert session.is_agreed() is agrees
