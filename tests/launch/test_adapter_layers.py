# SPDX-License-Identifier: Apache-2.0
"""Layers in which an adapter would fail or have no effect get none, and are refused by name."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BambaConfig,
    BloomConfig,
    DebertaConfig,
    DebertaForSequenceClassification,
    FalconConfig,
    FalconMambaConfig,
    Gemma3nTextConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    PhimoeConfig,
    Qwen3_5TextConfig,
    T5Config,
)

import llama
from components.adapter_layers import find_unfit_layers
from components.model import add_adapters
from components.model_checks import check_adapters
from core.cli import parse
from fakes import fake_accelerator

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "bloom": BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
    "falcon": FalconConfig(**SHAPE),
    "gemma3n": Gemma3nTextConfig(
        **SHAPE,
        head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
        num_kv_shared_layers=0,
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        laurel_rank=4,
        altup_correct_scale=False,  # it is 0 at the start, and so would be some gradients
        activation_sparsity_pattern=[0.0, 0.0],
    ),
    "llama4": Llama4TextConfig(**SHAPE, **EXPERTS, head_dim=16, intermediate_size_mlp=32),
    "phimoe": PhimoeConfig(**SHAPE, **EXPERTS),
    "falcon_mamba": FalconMambaConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, state_size=4
    ),
    "jamba": JambaConfig(
        **SHAPE,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=2,
        mamba_d_state=4,
        use_mamba_kernels=False,
    ),
    "bamba": BambaConfig(
        **SHAPE, attn_layer_indices=[1], mamba_n_heads=2, mamba_d_head=32, mamba_d_state=4
    ),
    "qwen3_5": Qwen3_5TextConfig(
        **SHAPE,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
    ),
}
# The last parts of the paths
UNFIT = {
    "llama": set(),
    "bloom": set(),
    "falcon": set(),
    "gemma3n": {"correction_coefs"},
    "llama4": {"router"},
    "phimoe": {"router"},
    "falcon_mamba": {"x_proj", "dt_proj", "out_proj"},
    "jamba": {"dt_proj"},
    "bamba": {"out_proj"},
    "qwen3_5": set(),
}


def model_of(name):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIGS[name])


def names_of(paths):
    return {path.rpartition(".")[2] for path in paths}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_other_linear_layer_gets_an_adapter_that_is_trained(name):
    model = model_of(name)
    unfit = find_unfit_layers(model)
    assert names_of(unfit) == UNFIT[name]
    head = model.get_output_embeddings()
    linear = {
        path
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head
    }
    args = parse(llama.Arguments, words=["--use_peft"])
    adapted = add_adapters(model, args, fake_accelerator(), task_type="CAUSAL_LM").train()
    ids = torch.arange(3, 63).view(2, 30)
    adapted(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    trained = {
        path.removeprefix("base_model.model.").split(".lora_B")[0]
        for path, weight in adapted.named_parameters()
        if ".lora_B." in path and weight.grad is not None and weight.grad.any()
    }
    assert trained == linear - set(unfit)


@pytest.mark.parametrize(
    ("model", "layer", "reason"),
    [
        ("llama4", "router", "a Llama4Router does not put out what a linear layer does"),
        ("jamba", "dt_proj", "multiplies by its weight without calling the layer"),
    ],
)
def test_they_are_refused_by_name(model, layer, reason, capsys):
    with pytest.raises(SystemExit, match="64"):
        check_adapters(model_of(model), [layer])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--lora_target_modules {layer}: " in line and reason in line


def test_layers_whose_weight_is_only_looked_at_get_adapters():
    t5 = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    assert find_unfit_layers(AutoModelForSeq2SeqLM.from_config(t5)) == {}
    shape = {**SHAPE, "pos_att_type": ["c2p"], "relative_attention": True}
    assert find_unfit_layers(DebertaForSequenceClassification(DebertaConfig(**shape))) == {}
