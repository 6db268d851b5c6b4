# SPDX-License-Identifier: Apache-2.0
"""Operation counts are those of the model."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.models import MODELS
from bench.operations import flops_per_token, matmul_weights, peak_of


@pytest.mark.parametrize("name", ["medium", "8B"])
def test_the_weights_that_multiply_are_those_of_the_model(name):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**MODELS[name]))
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert matmul_weights(MODELS[name]) == sum(module.weight.numel() for module in linear)


def test_operations_per_token():
    big = MODELS["8B"]
    weights = 7_504_658_432
    attention = 12 * 32 * 4096 * 4096
    assert flops_per_token(big, 4096) == 6 * weights + attention
    assert flops_per_token(big, 4096, causal=True) == 6 * weights + attention / 2
    assert flops_per_token(big, 4096, lora=True) == 4 * weights + attention


def test_a_peak_is_known_by_the_name_of_the_card():
    assert peak_of("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_of("a CPU") is None
