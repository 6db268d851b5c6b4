# SPDX-License-Identifier: Apache-2.0
"""Models side by side: which were asked for, and that they share their base without sharing
answers."""

from argparse import Namespace
from threading import Event

import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from adapter_folders import make_base, write_adapters
from chatting.speakers import load_speakers
from core.chat import Conversation

OPTIONS = {"dtype": "float32", "device": "cpu", "load_in_4bit": False, "temperature": 0.0}
OPTIONS |= {"max_new_tokens": 12, "chat_template_kwargs": {}}


@pytest.fixture(scope="module")
def base(once):
    """A folder with model/ and data/."""
    return once("chatting_base", make_base)


@pytest.fixture(scope="module")
def adapters(base, once):
    """Four folders of adapters on the same base: two of LoRA, DoRA, and one with a whole module."""

    def fill(folder):
        kinds = ({}, {}, {"use_dora": True}, {"modules_to_save": ["lm_head"]})
        for seed, options in enumerate(kinds):
            write_adapters(folder / str(seed), base, seed=seed, scale=0.5, **options)

    folder = once("chatting_adapters", fill)
    return [folder / str(seed) for seed in range(4)]


def load(names, with_base=False):
    args = Namespace(**OPTIONS, model_name_or_path=names, with_base=with_base)
    return load_speakers(args)


def answer(speaker, prompt="Spell the word lamp."):
    conversation = Conversation([{"role": "user", "content": prompt}])
    _, whole = speaker.answerer.start(conversation, Event(), speaker.taking_turn())
    return whole.result().text


def answer_loaded_on_its_own(folder):
    (speaker,) = load([str(folder)])
    return answer(speaker)


@pytest.fixture
def loaded(monkeypatch):
    """The folders whose weights were loaded as whole models, one entry for each time."""
    calls = []
    load_model = AutoModelForCausalLM.from_pretrained

    def count(name, **options):
        calls.append(name)
        return load_model(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", count)
    return calls


def test_adapters_and_their_base_are_one_loaded_model_with_answers_of_their_own(
    base, adapters, loaded
):
    together = load([str(folder) for folder in adapters], with_base=True)
    assert loaded == [str(base / "model")]
    assert len({id(speaker.answerer.model) for speaker in together}) == 1
    assert isinstance(together[0].answerer.model, PeftModel)
    # In both orders, so that no adapter stays active
    answers = [answer(speaker) for speaker in together]
    again = [answer(speaker) for speaker in reversed(together)]
    assert answers == again[::-1] and len(set(answers)) == len(together) == 5
    on_their_own = [answer_loaded_on_its_own(folder) for folder in (*adapters, base / "model")]
    assert answers == on_their_own
