# SPDX-License-Identifier: Apache-2.0
"""Answers in an evaluation do not depend on the attention that training has."""

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import llama
from core.chat import ChatTemplate
from extras.predict.answers import PromptCollator, attending_to_padded_rows
from extras.varlen import attention as varlen

TALK = [
    {"role": "user", "content": "Spell ab."},
    {"role": "assistant", "content": "a-b"},
    {"role": "user", "content": "Spell cd."},
    {"role": "assistant", "content": "c-d"},
]


@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole", "adapters"])
def test_a_model_with_varlen_answers_padded_prompts_as_with_sdpa(has_adapters, tiny):
    template = ChatTemplate(AutoTokenizer.from_pretrained(tiny / "model"))
    rows = []
    for number, messages in enumerate((TALK, TALK[:2]), 1):
        rows.append(llama.tokenize_row({"messages": messages}, template, 1024) | {"row": number})
    batch = PromptCollator(0)(Dataset.from_list(rows).with_format("numpy"), [[0], [1]])
    answers = []
    for implementation in ("sdpa", varlen.NAME):
        model = AutoModelForCausalLM.from_pretrained(
            tiny / "model", attn_implementation=implementation
        )
        if has_adapters:
            model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM"))
        with attending_to_padded_rows(model):
            answers.append(model.generate(**batch["inputs"], max_new_tokens=4, do_sample=False))
        assert model.config._attn_implementation == implementation
    assert torch.equal(*answers)
