# SPDX-License-Identifier: Apache-2.0
"""NEFTune's noise: in training only, and as large as the paper has it."""

import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from core.model import add_neftune

TOKENS = torch.arange(12).view(2, 6)
LLAMA = LlamaConfig(
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    vocab_size=16,
)


@pytest.fixture(params=[False, True], ids=["full", "adapters"])
def model(request):
    model = AutoModelForCausalLM.from_config(LLAMA)
    if request.param:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    return model.train()


def embedded(model, seed=0):
    torch.manual_seed(seed)
    return model.get_input_embeddings()(TOKENS)


def test_noise_is_added_in_training_only_and_as_large_as_the_paper_says(model):
    plain = embedded(model)
    add_neftune(model, None)
    assert torch.equal(embedded(model), plain)
    add_neftune(model, 5.0)
    noise = (embedded(model) - plain).abs()
    largest = 5 / math.sqrt(6 * 8)
    assert noise.max() <= largest + 1e-6 and noise.max() > 0.9 * largest
    assert (noise > 0).all()
    model.eval()
    assert torch.equal(embedded(model), plain)
