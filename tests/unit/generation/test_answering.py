# SPDX-License-Identifier: Apache-2.0
"""An answer comes in parts, can be stopped, says why it ended, and cannot drive a terminal."""

from argparse import Namespace
from threading import Event

import pytest
import torch

from adapter_folders import make_base
from core.chat import Conversation
from generation import loading
from generation.answering import CUT, STOPPED, Answerer, printable

QUESTION = Conversation([{"role": "user", "content": "Spell the word lamp."}])


@pytest.fixture(scope="module")
def answerer(once):
    source = loading.find_source(str(once("chatting_base", make_base) / "model"))
    torch.manual_seed(0)
    args = Namespace(dtype="float32", device="cpu", load_in_4bit=False)
    return Answerer(loading.load_model(source, args), source.template(), 0.0, 40)


def test_the_parts_are_the_answer_that_is_given_without_streaming(answerer):
    parts, reply = answerer.start(QUESTION, Event())
    parts = list(parts)
    (whole,) = answerer.answer([QUESTION], 1)
    assert reply.result().text == whole == "".join(parts).strip()
    assert reply.result().mark == CUT


def test_a_model_of_texts_is_not_asked_about_an_image(answerer):
    asked = Conversation(QUESTION.messages, images=["cat.png"])
    with pytest.raises(ValueError, match="reads no images"):
        answerer.answer([asked], 1)


class SetAfter(Event):
    """An event that is set by being looked at for the N-th time, which threads cannot change."""

    def __init__(self, times):
        super().__init__()
        self.times = times

    def is_set(self):
        self.times -= 1
        return self.times < 0


def test_a_stopped_answer_keeps_the_part_until_then(answerer):
    (whole,) = answerer.answer([QUESTION], 1)
    parts, reply = answerer.start(QUESTION, SetAfter(10))
    parts = list(parts)
    reply = reply.result()
    assert reply.mark == STOPPED and reply.text == "".join(parts).strip()
    assert reply.text and reply.text != whole


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x07", "\\x1b[2J\\x07"),  # would clear the screen and ring the bell
        ("a\rb\x08c\x9bd", "a\\rb\\x08c\\x9bd"),
        ("\ud800", "\\ud800"),
        ("two\n\tlines, Größe 東京 🙂 👩\u200d🔬", "two\n\tlines, Größe 東京 🙂 👩\u200d🔬"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(text, shown):
    assert printable(text) == shown
