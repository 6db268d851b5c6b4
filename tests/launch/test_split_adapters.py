# SPDX-License-Identifier: Apache-2.0
"""What peft and torch make of adapters and copies of split layers, without our workarounds.

That they are trained as in one process is shown in test_cells.py.
"""

from contextlib import nullcontext

import pytest
import torch
from accelerate.utils import set_seed
from transformers import LlamaConfig, LlamaForCausalLM

import llama
from components import upstream
from components.cli import parse_arguments
from components.strategy import new_accelerator
from harm import shows_harm_without
from ranks import on_ranks

TP = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"}
COPIES = "--use_peft --modules_to_save lm_head embed_tokens --dtype float32"
SIZES = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The folder of a model whose heads two ranks can share."""
    folder = tmp_path_factory.mktemp("small")
    LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS)).save_pretrained(folder)
    return folder


def model_of(folder, words=COPIES):
    """The model with its adapters, as the recipe loads it on this rank."""
    words = ["--model_name_or_path", str(folder), *words.split()]
    args = parse_arguments(llama.Arguments, words=words)
    accelerator = new_accelerator(args)
    set_seed(0)
    return llama.load_model(args, accelerator)


@shows_harm_without("making_whole_adapters")
def test_peft_makes_adapters_of_a_part_of_a_weight(small, cured):
    def widths():
        if not cured:
            upstream.making_whole_adapters = nullcontext
        model = model_of(small, "--use_peft --lora_target_modules o_proj --dtype float32")
        named = model.named_parameters()
        return {name: tuple(weight.shape) for name, weight in named if weight.requires_grad}

    (whole,) = on_ranks(widths)
    for found in on_ranks(widths, 2, **TP):
        assert (found == whole) == cured


@shows_harm_without("copying_split_weights")
def test_torch_copies_no_split_weights(small, cured):
    def error():
        if not cured:
            upstream.copying_split_weights = nullcontext
        try:
            model_of(small)
        except RuntimeError as problem:
            return str(problem)
        return ""

    # The part of the first rank begins at address 0, which torch takes for a tensor without one
    _, found = on_ranks(error, 2, **TP)
    assert (found == "") if cured else ("invalid python storage" in found)


@shows_harm_without("run_copy_by_itself")
def test_a_copy_of_a_split_layer_runs_the_original(small, cured):
    def has_gradient():
        if not cured:
            upstream.run_copy_by_itself = lambda *_: None
        model = model_of(small)
        model(input_ids=torch.arange(4, 12)[None], use_cache=False).logits.sum().backward()
        weights = dict(model.named_parameters())
        return weights["base_model.model.lm_head.modules_to_save.default.weight"].grad is not None

    assert on_ranks(has_gradient, 2, **TP) == [cured] * 2
