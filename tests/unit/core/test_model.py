# SPDX-License-Identifier: Apache-2.0
"""A model that would silently be trained as something else is refused, each by one line."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_auto_wrap_policy
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Ernie4_5_MoeConfig,
    Gemma2Config,
    GPTNeoConfig,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    PhimoeConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from core import workarounds
from core.model import check_model, find_untrained, keep_costly, set_up_layers, unfit_layers
from harm import shows_harm_without

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 32}
WITH_SDPA = LlamaConfig(**SMALL, intermediate_size=64)
GEMMA = Gemma2Config(**SMALL, intermediate_size=64, num_key_value_heads=4, head_dim=16)
GPT_NEO = GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]])
BLOOM = BloomConfig(hidden_size=64, n_head=4, n_layer=1, vocab_size=32)


def shapes_of(config):
    """A causal language model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "gives_ends", "word"),
    [
        (WITH_SDPA, False, ""),
        (WITH_SDPA, True, ""),
        (GEMMA, False, ""),
        (BLOOM, False, "position_ids"),  # knows no positions
        (OPTConfig(num_hidden_layers=1), False, "position_ids"),
        (Qwen3NextConfig(num_hidden_layers=4), True, "linear_attention"),  # carries a state along
        (GPT_NEO, False, ""),  # its masks know positions, its attention no ends
        (GPT_NEO, True, "ends"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_cannot_keep_rows_of_a_line_apart(config, gives_ends, word, capsys):
    model = shapes_of(config)
    check_model(model, 0, gives_ends=gives_ends)
    if not word:
        check_model(model, 0, shares_lines=True, gives_ends=gives_ends)
        return
    with pytest.raises(SystemExit, match="64"):
        check_model(model, 0, shares_lines=True, gives_ends=gives_ends)
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "name", "tied", "word"),
    [
        ("lora_target_modules", "all-linear", False, ""),
        ("lora_target_modules", "mlp.up_proj", False, ""),
        ("lora_target_modules", "q_prj", False, "none of this name"),
        ("modules_to_save", "lm_head", False, ""),
        ("modules_to_save", "lm_haed", False, "lm_haed"),
        ("modules_to_save", "lm_head", True, "share"),
        ("modules_to_save", "embed_tokens", True, "share"),
    ],
)
def test_names_of_which_nothing_would_be_trained(flag, name, tied, word):
    model = shapes_of(LlamaConfig(**SMALL, intermediate_size=64, tie_word_embeddings=tied))
    args = SimpleNamespace(lora_target_modules=["q_proj"], modules_to_save=[])
    vars(args)[flag] = [*vars(args)[flag], name]  # peft takes what it finds
    problems = list(find_untrained(model, args))
    assert len(problems) == bool(word)
    assert all(word in problem and name in problem for problem in problems)


class Operators(TorchDispatchMode):
    """Counts the operators that run, {name: number}."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.counts[str(operator)] += 1
        return operator(*args, **(kwargs or {}))


def backward_pass(how, use_peft):
    """The gradients of a model under --gradient_checkpointing, and what its backward pass runs."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, intermediate_size=64))
    set_up_layers(model, SimpleNamespace(gradient_checkpointing=how))
    if use_peft:
        adapters = LoraConfig(
            target_modules="all-linear", lora_dropout=0.1, init_lora_weights=False
        )
        model = get_peft_model(model, adapters)
    tokens = torch.arange(32)[None]
    loss = model.train()(input_ids=tokens, labels=tokens).loss
    with Operators() as ran:
        loss.backward()
    return [weight.grad for weight in model.parameters() if weight.requires_grad], ran.counts


@pytest.mark.parametrize("use_peft", [False, True], ids=["full", "LoRA"])
def test_selective_recomputation_gives_the_same_bits_without_the_products(use_peft):
    plain, needed = backward_pass("no", use_peft)
    full, _ = backward_pass("full", use_peft)
    selective, ran = backward_pass("selective", use_peft)
    for one, other, third in zip(plain, full, selective, strict=True):
        assert torch.equal(one, other) and torch.equal(one, third)
    assert "aten._scaled_dot_product_flash_attention_for_cpu.default" not in ran
    assert ran["aten.silu.default"] == 1
    if not use_peft:  # The large second products of adapters are computed again
        assert ran["aten.mm.default"] == needed["aten.mm.default"]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_attention_that_draws_random_numbers_draws_them_again(dropout):
    """Else the dropout after it would have other numbers in what is computed again."""
    operator = torch.ops.aten._scaled_dot_product_efficient_attention.default
    policy = keep_costly(None, operator, *[torch.ones(1)] * 3, None, True, dropout)
    assert (policy == CheckpointPolicy.MUST_SAVE) == (not dropout)


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


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (BLOOM, set()),  # reads weights only where no recipe gets
        (
            MambaConfig(hidden_size=64, num_hidden_layers=1, vocab_size=32),
            {"out_proj", "dt_proj", "x_proj"},
        ),
        (PhimoeConfig(**SMALL, intermediate_size=64, num_key_value_heads=4), {"router"}),
    ],
)
def test_no_adapter_where_it_would_fail_or_have_no_effect(config, names):
    assert {path.rpartition(".")[2] for path in unfit_layers(shapes_of(config))} == names
