# SPDX-License-Identifier: Apache-2.0
"""The share of a card's peak that a run takes: FLOPs of a token as torch counts them."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    MixtralConfig,
)

from core.metrics import peak_flops
from core.summary import flops_per_token

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 32}
LLAMA = LlamaConfig(**SMALL, intermediate_size=96)
TIED = LlamaConfig(**SMALL, intermediate_size=96, tie_word_embeddings=True)
MIXTRAL = MixtralConfig(
    **SMALL, intermediate_size=96, num_key_value_heads=2, num_local_experts=4, sliding_window=None
)
TOKENS = 16
OF_CAUSAL_ATTENTION = 2 * 6 * 64 * TOKENS**2


@pytest.mark.parametrize("config", [LLAMA, TIED, MIXTRAL], ids=["llama", "tied", "mixtral"])
def test_flops_are_those_that_torch_counts_with_half_of_the_attention(config):
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **eager).train()
    tokens = torch.arange(TOKENS)[None]
    with FlopCounterMode(display=False) as counter:
        model(input_ids=tokens).logits.sum().backward()
    found = TOKENS * flops_per_token(model, None, np.array([TOKENS]))
    assert found + OF_CAUSAL_ATTENTION == pytest.approx(counter.get_total_flops(), rel=1e-6)


def test_a_frozen_base_takes_two_thirds_and_rows_attend_to_themselves():
    model = AutoModelForCausalLM.from_config(LLAMA)
    full = flops_per_token(model, None, np.array([TOKENS])) - OF_CAUSAL_ATTENTION / TOKENS
    adapted = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    adapters = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    attention = 2 * 12 * 64 * (2**2 + 4**2) / (2 + 4) / 2
    found = flops_per_token(adapted, None, np.array([2, 4]))
    assert found == pytest.approx(full * 2 / 3 + 6 * adapters + attention)


def test_what_is_no_causal_language_model_has_none():
    shape = SMALL | {"intermediate_size": 64}
    model = AutoModelForSequenceClassification.from_config(BertConfig(**shape))
    assert flops_per_token(model, None, None) is None


@pytest.mark.parametrize(
    ("card", "tflops"),
    [("NVIDIA H200", 989), ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("A", None)],
)
def test_the_peak_of_a_card_is_by_its_name(card, tflops, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: card)
    found = peak_flops(torch.device("cuda"))
    assert found == (tflops and tflops * 1e12)
    assert peak_flops(torch.device("cpu")) is None
