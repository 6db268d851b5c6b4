# SPDX-License-Identifier: Apache-2.0
"""What a model says cannot drive a terminal; tests/launch/test_chat.py has whole conversations."""

import pytest
import torch

import image_models
from core.chat import ChatTemplate, Conversation
from generation.answering import Answerer, printable
from tasks.illustrated import IMAGE, IllustratedTemplate


def test_a_model_of_texts_is_not_asked_about_an_image():
    model, processor = image_models.make(next(iter(image_models.FAMILIES)))
    asked = Conversation([{"role": "user", "content": "What is it?"}], images=["cat.png"])
    with pytest.raises(ValueError, match="reads no images"):
        Answerer(model, ChatTemplate(processor.tokenizer), 0.0, 1).answer([asked], 1)


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
