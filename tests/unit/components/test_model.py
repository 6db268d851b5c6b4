# SPDX-License-Identifier: Apache-2.0
"""The model that components/model.py loads for a recipe's arguments."""

import pytest
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    GPTJConfig,
    LlamaConfig,
    Qwen3_5TextConfig,
)

import llama
from components.model import load_pretrained
from core import workarounds
from core.cli import parse
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
def test_each_family_gets_an_attention_that_it_has(config, chosen, tmp_path):
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args = parse(llama.Arguments, words=["--model_name_or_path", str(tmp_path)])
    model = load_pretrained(AutoModelForCausalLM, args, fake_accelerator())
    assert model.config._attn_implementation == chosen  # As the summary says


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
        workarounds.keep_frozen_weights_frozen(loaded)
    frozen = names_of_frozen(made)
    assert frozen == ["model.layers.0.mlp.gate.moe_statics.e_score_correction_bias"]
    assert (names_of_frozen(loaded) == frozen) == cured


def names_of_frozen(model):
    return [name for name, weight in model.named_parameters() if not weight.requires_grad]


@shows_harm_without("name_layers_to_wrap")
def test_fsdp_wraps_a_language_model_that_names_layers_of_a_vision_tower(cured):
    shape = {**SMALL, "intermediate_size": 64, "num_key_value_heads": 4, "head_dim": 16}
    config = Qwen3_5TextConfig(**shape, layer_types=["full_attention"])
    model = AutoModelForCausalLM.from_config(config)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    if not cured:
        with pytest.raises(ValueError, match="Qwen3_5VisionBlock"):
            fsdp2_prepare_auto_wrap_policy(plugin, model)
        return
    workarounds.name_layers_to_wrap(model)
    wraps = fsdp2_prepare_auto_wrap_policy(plugin, model)
    wrapped = [type(module).__name__ for module in model.modules() if wraps(module)]
    assert wrapped == ["Qwen3_5DecoderLayer"]
