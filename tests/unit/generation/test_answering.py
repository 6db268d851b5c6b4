# SPDX-License-Identifier: Apache-2.0
"""An answer comes in parts, can be stopped, says why it ended, and cannot drive a terminal."""

from argparse import Namespace
from threading import Event

import pytest
import torch

import image_models
from adapter_folders import make_base
from core.chat import Conversation
from generation import loading
from generation.answering import CUT, STOPPED, Answerer, printable
from tasks.illustrated import IMAGE, IllustratedTemplate

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


@pytest.mark.parametrize("family", image_models.FAMILIES)
def test_a_token_is_as_likely_beside_questions_with_other_images_and_with_none(family):
    model, processor = image_models.make(family)
    template = IllustratedTemplate(processor.tokenizer, {}, processor)
    answerer = Answerer(model.eval(), template, 0.0, 1)

    def ask(*conversations):
        inputs, options = answerer.prepare(conversations)
        options |= {"return_dict_in_generate": True, "output_logits": True}
        return model.generate(**inputs, **options).logits[0]

    conversations = []
    for number in range(3):
        loads = [lambda seed=seed: (image_models.picture(60, 40, seed), 0) for seed in (1, 2)]
        asked = {"role": "user", "content": IMAGE * number + "And now? " * (3 - number)}
        conversations.append(Conversation([asked], images=loads[:number]))
    alone = torch.cat([ask(one) for one in conversations])
    # fp32, whose sums have another order
    torch.testing.assert_close(ask(*conversations), alone, rtol=1e-4, atol=1e-4)


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
