# SPDX-License-Identifier: Apache-2.0
"""Models side by side share their base without sharing answers."""

from argparse import Namespace
from threading import Event

from peft import PeftModel
from transformers import AutoModelForCausalLM

from adapter_folders import make_base, write_adapters
from chatting.speakers import load_speakers
from core.chat import Conversation

OPTIONS = {"dtype": "float32", "device": "cpu", "load_in_4bit": False, "temperature": 0.0}
OPTIONS |= {"max_new_tokens": 12, "chat_template_kwargs": {}}
# Two of LoRA, DoRA, and one with a whole module
KINDS = ({}, {}, {"use_dora": True}, {"modules_to_save": ["lm_head"]})


def load(*folders, with_base=False):
    names = [str(folder) for folder in folders]
    return load_speakers(Namespace(**OPTIONS, model_name_or_path=names, with_base=with_base))


def answer(speaker):
    conversation = Conversation([{"role": "user", "content": "Spell the word lamp."}])
    _, whole = speaker.answerer.start(conversation, Event(), speaker.taking_turn())
    return whole.result().text


def test_adapters_and_their_base_are_one_loaded_model_with_answers_of_their_own(
    once, tmp_path, monkeypatch
):
    base = once("chatting_base", make_base)
    adapters = []
    for seed, options in enumerate(KINDS):
        adapters.append(write_adapters(tmp_path / str(seed), base, seed=seed, scale=0.5, **options))
    loaded = []
    load_model = AutoModelForCausalLM.from_pretrained

    def count(name, **options):
        loaded.append(name)
        return load_model(name, **options)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", count)
    together = load(*adapters, with_base=True)
    assert loaded == [str(base / "model")]
    assert len({id(speaker.answerer.model) for speaker in together}) == 1
    assert isinstance(together[0].answerer.model, PeftModel)
    # In both orders, so that no adapter stays active
    answers = [answer(speaker) for speaker in together]
    again = [answer(speaker) for speaker in reversed(together)]
    assert answers == again[::-1] and len(set(answers)) == len(together) == 5
    assert answers == [answer(*load(folder)) for folder in (*adapters, base / "model")]
