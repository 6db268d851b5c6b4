# SPDX-License-Identifier: Apache-2.0
"""The model that components/model.py loads for a recipe's arguments."""

import pytest
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    GPTJConfig,
    LlamaConfig,
)

import llama
from components import upstream
from components.cli import parse_arguments
from components.model import load_pretrained
from components.summary import kernels_in_use
from fakes import fake_accelerator
from harm import shows_harm_without

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
WITH_SDPA = LlamaConfig(**SMALL, intermediate_size=64)
GEMMA = Gemma2Config(**SMALL, intermediate_size=64, num_key_value_heads=4, head_dim=16)
GPTJ = GPTJConfig(n_embd=64, n_head=4, n_layer=1, vocab_size=32, rotary_dim=4)
BLOOM = BloomConfig(hidden_size=64, n_head=4, n_layer=1, vocab_size=32)


@pytest.mark.parametrize(
    ("config", "chosen"),
    [(WITH_SDPA, "sdpa"), (GEMMA, "eager"), (GPTJ, "eager"), (BLOOM, "eager")],
    ids=lambda value: getattr(value, "model_type", value),
)
def test_each_family_gets_an_attention_that_it_has_and_the_summary_names_it(
    config, chosen, tmp_path
):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args = parse_arguments(llama.Arguments, words=["--model_name_or_path", str(tmp_path)])
    model = load_pretrained(AutoModelForCausalLM, args, fake_accelerator())
    assert f"attention {chosen}" in kernels_in_use(args, model)


@shows_harm_without("keep_frozen_weights_frozen")
def test_weights_that_the_model_freezes_stay_frozen(cured, tmp_path):
    config = Ernie4_5_MoeConfig(
        **SMALL,
        intermediate_size=64,
        num_key_value_heads=4,
        moe_num_experts=2,
        moe_k=1,
        moe_intermediate_size=16,
        moe_layer_start_index=0,
    )
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    if cured:
        upstream.keep_frozen_weights_frozen(loaded)
    frozen = names_of_frozen(made)
    assert frozen == ["model.layers.0.mlp.gate.moe_statics.e_score_correction_bias"]
    assert (names_of_frozen(loaded) == frozen) == cured


def names_of_frozen(model):
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]
