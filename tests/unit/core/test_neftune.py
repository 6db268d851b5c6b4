# SPDX-License-Identifier: Apache-2.0
"""NEFTune's noise: in training only, and as large as the paper has it."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from core.model import add_neftune
from fakes import small_llama

TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("has_adapters", [False, True], ids=["full", "adapters"])
def test_noise_is_added_in_training_only_and_as_large_as_the_paper_says(has_adapters):
    model = AutoModelForCausalLM.from_config(small_llama()).train()
    if has_adapters:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    embed = model.get_input_embeddings()
    plain = embed(TOKENS)
    add_neftune(model, None)
    assert torch.equal(embed(TOKENS), plain)
    add_neftune(model, 5.0)
    noise = (embed(TOKENS) - plain).abs()
    largest = 5 / math.sqrt(6 * 32)
    assert noise.max() <= largest + 1e-6 and noise.max() > 0.9 * largest
    assert (noise > 0).all()
    model.eval()
    assert torch.equal(embed(TOKENS), plain)
