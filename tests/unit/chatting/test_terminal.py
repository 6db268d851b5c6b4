# SPDX-License-Identifier: Apache-2.0
"""The terminal cannot be driven; tests/launch/test_chat.py has conversations in it."""

from concurrent.futures import Future
from contextlib import nullcontext
from types import SimpleNamespace

from chatting.conversation import History
from chatting.terminal import Terminal
from generation.answering import Reply


def test_what_a_model_or_a_prompt_says_cannot_drive_the_terminal(monkeypatch, tmp_path, capsys):
    typed = ["Hi", "/\x1b]0;title\x07"]

    def read(prompt=""):
        if not typed:
            raise EOFError
        return typed.pop(0)

    def start(conversation, stopping, turn):
        whole = Future()
        whole.set_result(Reply("\x1b[2J\x07"))
        return ["\x1b[2J", "\x07"], whole

    monkeypatch.setattr("builtins.input", read)
    answerer = SimpleNamespace(start=start)
    speaker = SimpleNamespace(name="a", answerer=answerer, taking_turn=nullcontext)
    Terminal([speaker], History(), tmp_path / "rows.jsonl").run()
    printed = capsys.readouterr()
    assert printed.out == "\\x1b[2J\\x07\n\n" and "/\\x1b]0;title\\x07: no such" in printed.err
