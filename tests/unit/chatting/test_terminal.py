# SPDX-License-Identifier: Apache-2.0
"""The terminal: what is read, shown, kept and refused, with models that say what they are told."""

from concurrent.futures import Future
from contextlib import nullcontext

import pytest

from chatting.conversation import History
from chatting.terminal import Terminal
from generation.answering import Reply


class FakeSpeaker:
    """A model with answers to give, each a list of parts; `asked` has the messages that it saw."""

    def __init__(self, name, *answers):
        self.name = name
        self.answerer = self
        self.answers = list(answers)
        self.asked = []

    def taking_turn(self):
        return nullcontext()

    def start(self, conversation, stopping, turn):
        self.asked.append(conversation.messages)
        parts = self.answers.pop(0)
        whole = Future()
        whole.set_result(Reply("".join(parts)))
        return parts, whole


@pytest.fixture
def converse(monkeypatch, tmp_path, capsys):
    """A function from models and lines of input to the terminal, and what was printed."""

    def run(speakers, *lines):
        typed = iter(lines)

        def read(prompt=""):
            for line in typed:
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        terminal = Terminal(speakers, History(), tmp_path / "rows.jsonl")
        terminal.run()
        return terminal, capsys.readouterr()

    return run


def test_what_a_model_or_a_prompt_says_cannot_drive_the_terminal(converse):
    model = FakeSpeaker("a", ["\x1b[2J", "\x07"])
    _, printed = converse([model], "Hi", "/\x1b]0;title\x07")
    assert printed.out == "\\x1b[2J\\x07\n\n" and "/\\x1b]0;title\\x07: no such" in printed.err


def test_all_models_are_asked_and_the_chosen_ones_answers_continue(converse):
    models = [FakeSpeaker("a", ["a1"], ["a2"], ["a3"]), FakeSpeaker("b", ["b1"], ["b2"], ["b3"])]
    _, printed = converse(models, "one", "two", "/model 2", "three")
    for model in models:
        seen = [[message["content"] for message in messages] for messages in model.asked]
        assert seen[1] == ["one", "a1", "two"]
        assert seen[2] == ["one", "b1", "two", "b2", "three"]
    assert "1 a:\na1\n2 b:\nb1\n" in printed.out
    assert "1 a\n2 b\nThe conversation continues with the answers of 2" in printed.out
