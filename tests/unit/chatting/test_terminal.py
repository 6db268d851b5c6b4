# SPDX-License-Identifier: Apache-2.0
"""The terminal: what is read, shown, kept and refused, with models that say what they are told."""

import pytest

from chatting.conversation import History
from chatting.terminal import Terminal
from generation.answering import Ending, Reply


class FakeAnswer:
    """An answer in parts."""

    def __init__(self, parts):
        self.parts = iter(parts)
        self.said = []

    def __iter__(self):
        return self

    def __next__(self):
        self.said.append(next(self.parts))
        return self.said[-1]

    def result(self):
        if self.said == ["refused"]:
            raise ValueError("the prompt has 900 tokens; the model is limited to 512\nmore")
        return Reply("".join(self.said), Ending.COMPLETE)


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
