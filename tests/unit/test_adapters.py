"""With adapters the adapters are trained and nothing else, whatever they sit on; without them, every weight."""

import sys

import pytest
from transformers import AutoModelForCausalLM, BloomConfig, GPT2Config, LlamaConfig

import llama
import preflight
from fakes import fake_accelerator

ONE_PROCESS = fake_accelerator()


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--use_peft"],
        ["--use_peft", "--use_dora"],
        ["--use_peft", "--load_in_4bit"],
        ["--use_peft", "--load_in_8bit"],
    ],
    ids=lambda flags: " ".join(flags) or "full",
)
def test_exactly_what_should_train_is_trained(flags, tiny, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["llama.py", "--model_name_or_path", str(tiny / "model"), *flags]
    )
    args = llama.parse_args()
    model = llama.load_model(args, ONE_PROCESS)
    weights = dict(model.named_parameters())
    expected = [name for name in weights if "lora_" in name or not flags]
    assert (
        expected and [name for name, weight in weights.items() if weight.requires_grad] == expected
    )
    stepped = {
        id(weight)
        for group in llama.make_optimizer(model, args).param_groups
        for weight in group["params"]
    }
    assert [name for name, weight in weights.items() if id(weight) in stepped] == expected
    base = [preflight.size_of(weight) for name, weight in weights.items() if "lora_" not in name]
    assert (
        sum(base) == AutoModelForCausalLM.from_pretrained(tiny / "model").num_parameters()
    )  # 4-bit ones unpacked


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            vocab_size=16,
        ),
        GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16),
        BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=16),
    ],
    ids=lambda config: config.model_type,
)
def test_biases_and_norms_do_not_decay(config, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py", "--weight_decay", "0.1"])
    model = AutoModelForCausalLM.from_config(config)
    decayed, kept = llama.make_optimizer(model, llama.parse_args()).param_groups
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert {weight.dim() for weight in decayed["params"]} == {2} and {
        weight.dim() for weight in kept["params"]
    } == {1}
