# SPDX-License-Identifier: Apache-2.0
"""The terminal: what is read, shown, kept and refused, with models that say what they are told."""

import json

import pytest

from chatting.conversation import History
from chatting.terminal import Terminal
from generation.answering import Ending, Reply


class FakeAnswer:
    """An answer in parts; a part that is an exception is raised instead."""

    def __init__(self, parts):
        self.parts = iter(parts)
        self.said = []
        self.ending = Ending.COMPLETE

    def __iter__(self):
        return self

    def __next__(self):
        part = next(self.parts)
        if not isinstance(part, str):
            raise part
        self.said.append(part)
        return part

    def stop(self):
        self.ending = Ending.STOPPED
        self.parts = iter([next(self.parts)])  # the part that was being generated

    def result(self):
        if self.said == ["refused"]:
            raise ValueError("the prompt has 900 tokens; the model is limited to 512\nmore")
        return Reply("".join(self.said), self.ending)


class FakeSpeaker:
    """A model with answers to give; `asked` has the messages that it saw."""

    def __init__(self, name, *answers):
        self.name = name
        self.answers = list(answers)
        self.asked = []

    def answer(self, history, prompt):
        self.asked.append(history.asking(prompt).messages)
        return FakeAnswer(self.answers.pop(0))


@pytest.fixture
def converse(monkeypatch, tmp_path, capsys):
    """A function from models and lines of input to the history, and what was printed."""

    def run(speakers, *lines, is_interactive=False):
        typed = iter(lines)
        prompts = []

        def read(prompt=""):
            prompts.append(prompt)
            try:
                line = next(typed)
            except StopIteration:
                raise EOFError from None
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        rows = tmp_path / "rows.jsonl"
        terminal = Terminal(speakers, History(), rows, is_interactive)
        terminal.run()
        return terminal, capsys.readouterr(), prompts

    return run


def texts(history):
    return [message["content"] for message in history.messages()]


def test_a_conversation_is_answered_turn_by_turn(converse):
    model = FakeSpeaker("a", ["Hel", "lo."], ["Bye."])
    terminal, printed, prompts = converse([model], "Hi", "", "  ", "Go")
    assert texts(terminal.history) == ["Hi", "Hello.", "Go", "Bye."]
    assert [message["content"] for message in model.asked[1]] == ["Hi", "Hello.", "Go"]
    assert printed.out == "Hello.\nBye.\n\n" and printed.err == ""
    assert set(prompts) == {""}  # no prompt for a pipe


def test_ctrl_c_stops_an_answer_and_keeps_its_part(converse):
    model = FakeSpeaker("a", ["Once ", KeyboardInterrupt(), "upon ", "a time"], ["ok"])
    terminal, printed, _ = converse([model], "Tell", "Now")
    assert texts(terminal.history) == ["Tell", "Once upon ", "Now", "ok"]
    assert terminal.history.turns[0].replies[0].ending is Ending.STOPPED
    assert "Once upon  [stopped]\nok" in printed.out


@pytest.mark.parametrize("end", [KeyboardInterrupt(), "/exit"])
def test_the_prompt_is_left_without_a_traceback(end, converse):
    model = FakeSpeaker("a")
    converse([model], end, "Next")
    assert model.asked == []


def test_what_a_model_or_a_prompt_says_cannot_drive_the_terminal(converse):
    model = FakeSpeaker("a", ["\x1b[2J", "\x07"])
    _, printed, _ = converse([model], "Hi", "/\x1b]0;title\x07")
    assert printed.out == "\\x1b[2J\\x07\n\n" and "/\\x1b]0;title\\x07: no such" in printed.err


def test_all_models_are_asked_and_the_chosen_ones_answers_continue(converse):
    models = [FakeSpeaker("a", ["a1"], ["a2"], ["a3"]), FakeSpeaker("b", ["b1"], ["b2"], ["b3"])]
    terminal, printed, _ = converse(models, "one", "two", "/model 2", "three")
    for model in models:
        seen = [[message["content"] for message in messages] for messages in model.asked]
        assert seen[1] == ["one", "a1", "two"]
        assert seen[2] == ["one", "b1", "two", "b2", "three"]
    assert "1 a:\na1\n2 b:\nb1\n" in printed.out
    assert "1 a\n2 b\nThe conversation continues with the answers of 2" in printed.out


def test_retry_changes_the_last_turn(converse):
    model = FakeSpeaker("a", ["first"], ["second"])
    terminal, _, _ = converse([model], "one", "/retry")
    assert texts(terminal.history) == ["one", "second"]
    assert [message["content"] for message in model.asked[1]] == ["one"]


def test_a_retry_that_fails_keeps_the_old_answer(converse):
    model = FakeSpeaker("a", ["first"], ["refused"])
    terminal, printed, _ = converse([model], "one", "/retry")
    assert texts(terminal.history) == ["one", "first"] and "900 tokens" in printed.err


def test_save_appends_the_conversation_of_the_chosen_model(converse, tmp_path):
    models = [FakeSpeaker("a", ["a1"]), FakeSpeaker("b", ["b1"])]
    other = tmp_path / "other.jsonl"
    _, printed, _ = converse(models, "one", "/save", "/model 2", f"/save {other}", "/save")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["messages"][1]["content"] for row in rows] == ["a1", "b1"]
    assert json.loads(other.read_text())["messages"][1]["content"] == "b1"
    assert "rows.jsonl has 2 rows." in printed.out
