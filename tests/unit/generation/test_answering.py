# SPDX-License-Identifier: Apache-2.0
"""An answer comes in parts, can be stopped, says why it ended, and cannot drive a terminal."""

from threading import Event

import pytest
import torch

from adapter_folders import make_base
from core.chat import ChatTemplate, Conversation
from generation import loading
from generation.answering import Answerer, Ending, RunningAnswer, printable

QUESTION = Conversation([{"role": "user", "content": "Spell the word lamp."}])


@pytest.fixture(scope="module")
def answerer(once):
    source = loading.find_source(str(once("chatting_base", make_base) / "model"))
    tokenizer = loading.load_tokenizer(source)
    torch.manual_seed(0)
    model = loading.load_model(source, "float32", "cpu")
    return Answerer(model, ChatTemplate(tokenizer), 0.0, 40)


def start(answerer, conversation=QUESTION, stopping=None, turn=None):
    return RunningAnswer(answerer, conversation, turn, stopping)


def test_the_parts_are_the_answer_that_is_given_without_streaming(answerer):
    running = start(answerer)
    parts = list(running)
    (whole,) = answerer.answer([QUESTION])
    assert running.result().text == whole == "".join(parts).strip()
    assert running.result().ending is Ending.CUT and len(parts) > 1


class SetAfter(Event):
    """An event that is set by being looked at for the N-th time, which threads cannot change."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def is_set(self):
        self.times -= 1
        return self.times < 0


def test_a_stopped_answer_keeps_the_part_until_then(answerer):
    (whole,) = answerer.answer([QUESTION])
    running = start(answerer, stopping=SetAfter(10))
    parts = list(running)
    reply = running.result()
    assert reply.ending is Ending.STOPPED
    assert reply.text == "".join(parts).strip().rstrip("\ufffd")  # the half of a character
    assert reply.text and whole.startswith(reply.text) and reply.text != whole


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),  # would clear the screen and ring the bell
        ("a\rb\x08c\x9bd", "a\\rb\\x08c\\x9bd"),
        ("\ud800\ue000", "\\ud800\\ue000"),
        ("two\n\tlines, Größe 東京 🙂 👩\u200d🔬", "two\n\tlines, Größe 東京 🙂 👩\u200d🔬"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, shown):
    assert printable(text) == shown
