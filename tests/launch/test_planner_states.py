# SPDX-License-Identifier: Apache-2.0
"""What the planner counts at rest: the live tensors' bytes, peft's own counts, and the published
arithmetic."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import llama
from core.engine import Layout
from core.model import make_adamw
from fakes import fake_accelerator
from planner.closed_form import closed_form, strategy_for
from planner.errors import UnplannableError
from planner.plan import Plan
from planner.request import Batch
from planner.shapes import build, read_model_config
from planner_jobs import training_arguments

GB = 10**9
SMALL = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
SEVEN = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}


def llama_config(shape, **others):
    return AutoConfig.for_model("llama", **shape | others)


def at_rest(config, *flags):
    strategy, _ = strategy_for(Plan(training_arguments(flags)), config)
    device, _ = strategy.at_rest()
    return device


def live_bytes(tensors):
    """Bytes of the distinct storages behind tensors."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(sizes.values())


def scales_of(model):
    """The tensors of bitsandbytes' quantization states, also those that all layers could share."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        state = getattr(weight, "quant_state", None)
        if state is not None:
            yield state.absmax
            yield state.code
            if state.nested:
                yield state.state2.absmax
                yield state.state2.code
        if getattr(weight, "SCB", None) is not None:
            yield weight.SCB


SHARED = ("step", "qmap1", "qmap2")  # a number, and tables of 1 KiB that all weights share
KINDS = {
    "full": ["--dtype", "float32"],
    "full, 8-bit AdamW": ["--optim", "adamw_8bit"],
    "LoRA, 8-bit AdamW": ["--optim", "adamw_8bit", "--use_peft", "--lora_r", "64"],
    "full, bf16": ["--dtype", "bfloat16"],
    "LoRA": ["--use_peft", "--lora_r", "8"],
    "LoRA, bf16": ["--use_peft", "--dtype", "bfloat16"],
    "int8": ["--use_peft", "--load_in_8bit"],
    "nf4": ["--use_peft", "--load_in_4bit"],
    "nf4, double": [
        "--use_peft",
        "--load_in_4bit",
        "--bnb_4bit_use_double_quant",
        "--dtype",
        "bfloat16",
    ],
    "fp4": ["--use_peft", "--load_in_4bit", "--bnb_4bit_quant_type", "fp4"],
}


@pytest.mark.parametrize("flags", KINDS.values(), ids=KINDS)
def test_states_are_the_live_tensors_bytes(flags, tmp_path):
    # A head of its own beside adapters, which never train it
    tied = "--use_peft" not in flags
    check_states(llama_config(SMALL, tie_word_embeddings=tied), flags, tmp_path)


WHOLE = ["--modules_to_save", "lm_head", "embed_tokens", "norm"]


@pytest.mark.parametrize("kind", ["LoRA", "LoRA, bf16", "int8", "nf4, double"])
def test_states_of_whole_modules_are_the_live_tensors_bytes(kind, tmp_path):
    flags = KINDS[kind]
    check_states(llama_config(SMALL), [*flags, *WHOLE], tmp_path)


def check_states(config, flags, tmp_path):
    """What the planner counts at rest is what the recipe's model and optimizer hold."""
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    args = training_arguments([*flags, "--model_name_or_path", str(tmp_path)])
    model = llama.load_model(args, Layout(fake_accelerator()))
    states = states_after_a_step(model, make_adamw(model, args))
    planned = at_rest(config, *flags)
    held = sum(planned.get(name, 0) for name in ("parameters", "adapters", "whole modules"))
    assert held == live_bytes(model.parameters())
    assert planned["optimizer"] == live_bytes(states)
    assert planned.get("quantization", 0) == live_bytes(scales_of(model))


def states_after_a_step(model, optimizer):
    """The tensors of an optimizer's state, apart from those that all weights share."""
    for weight in model.parameters():
        if weight.requires_grad:
            weight.grad = torch.zeros_like(weight)
    optimizer.step()
    return [
        value
        for state in optimizer.state.values()
        for name, value in state.items()
        if name not in SHARED
    ]


# Names of whole modules: none, ones without adapters, and ones that would have had some. peft takes
# each module whose path ends with a name, so that "norm" is every norm.
MODULES = [[], ["lm_head"], ["norm"], ["mlp"], ["q_proj", "embed_tokens"], ["self_attn.o_proj"]]


@pytest.mark.parametrize("modules", MODULES, ids=" ".join)
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "v_proj"]], ids=" ".join)
def test_what_trains_is_as_much_as_pefts(targets, modules):
    config = llama_config(SMALL)
    target_modules = "all-linear" if targets == ["all-linear"] else targets
    options = {"target_modules": target_modules, "modules_to_save": modules or None}
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
        model = get_peft_model(base, LoraConfig(r=16, **options))
    flags = ["--use_peft", "--lora_target_modules", *targets]
    if modules:
        flags += ["--modules_to_save", *modules]
    planned = at_rest(config, *flags)
    trained, everything = model.get_nb_trainable_parameters()
    held = planned["adapters"] + planned.get("whole modules", 0)
    assert held == 4 * trained
    assert held + planned["parameters"] == 4 * everything


@pytest.mark.parametrize("flags, bits", [([], 4.5), (["--bnb_4bit_use_double_quant"], 4.127)])
def test_four_bit_weights_take_the_published_bits(flags, bits):
    """32 / 64 bits of scales for each weight, or 8 / 64 + 32 / (64 x 256) (arXiv 2305.14314)."""
    config = llama_config(SEVEN)
    lora = ["--use_peft", "--dtype=bfloat16"]
    plain = at_rest(config, *lora)
    quantized = at_rest(config, *lora, "--load_in_4bit", *flags)
    linear = sum(
        module.weight.numel()
        for name, module in build(
            training_arguments([]), config, fake_accelerator(expert_ranks=1)
        ).named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    )
    not_linear = plain["parameters"] - 2 * linear
    held = quantized["parameters"] + quantized["quantization"] - not_linear
    assert 8 * held / linear == pytest.approx(bits, abs=0.001)


def test_seven_billion_parameters_in_half_precision_take_56_gigabytes():
    """Two bytes for the weight, two for its gradient, four for AdamW's two numbers, all in half
    precision."""
    held = at_rest(llama_config(SEVEN), "--dtype", "bfloat16")
    parameters = held["parameters"] / 2
    gradients = held["parameters"]
    whole = held["parameters"] + gradients + held["optimizer"]
    assert whole * 7e9 / parameters == pytest.approx(56 * GB, rel=1e-6)


@pytest.mark.parametrize("ranks, whole", [(1, 8), (2, 12), (8, 12)])
def test_without_a_wrap_policy_a_parameter_takes_up_to_24_bytes(ranks, whole):
    """16 / N at rest, while sums of micro-batches are held; besides the whole model, unless a rank
    has it anyway, its whole gradients, and autograd's flat copy of them. On two ranks live tensors
    take the same 20 bytes."""
    args = training_arguments(["--gradient_accumulation_steps", "2"])
    plan = Plan(args, "fsdp1", ranks=ranks, shards=ranks, wraps_layers=False)
    config = llama_config(SMALL, hidden_size=512, intermediate_size=2048)
    device, _ = closed_form(plan, config, Batch(1, 1, 1))
    per_parameter = (
        sum(device.values())
        / build(args, config, fake_accelerator(expert_ranks=1)).num_parameters()
    )
    assert per_parameter == pytest.approx(16 / ranks + whole, rel=0.02)


def test_a_missing_field_of_a_config_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(UnplannableError, match="no field model_type"):
        read_model_config(str(tmp_path))
