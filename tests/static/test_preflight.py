"""What cannot run is refused before the start, with the reason and what to use instead: each kernel, each lever.

In process, with a GPU that is only told of.
"""

import sys
from types import SimpleNamespace

import llama
import preflight
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GPTNeoConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3NextConfig,
)

PACKAGES = {"flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "liger-kernel"}
AMPERE, ADA, HOPPER, TURING = (8, 0), (8, 9), (9, 0), (7, 5)
REFUSED = {  # flags, capability of the GPU or None for a CPU, packages that are there: what is said
    "flash attention on a CPU": (["--attn_implementation", "flash_attention_2"], None, PACKAGES, "needs a GPU: use"),
    "a hub kernel on a CPU": (["--attn_implementation", "kernels-community/fa3"], None, PACKAGES, "needs a GPU: use"),
    "flash attention that is not installed": (
        ["--attn_implementation", "flash_attention_2"], HOPPER, set(), "pip install flash-attn"),
    "a hub kernel without the package": (
        ["--attn_implementation", "kernels-community/flash-attn2"], HOPPER, set(), "pip install kernels"),
    "flash attention 2 on Turing": (["--attn_implementation", "flash_attention_2"], TURING, PACKAGES, "8.0 or more"),
    "flash attention 4 without its package": (
        ["--attn_implementation", "flash_attention_4"], HOPPER, {"flash-attn"}, "pip install flash-attn-4,"),
    "flash attention 4 on Ampere": (["--attn_implementation", "flash_attention_4"], AMPERE, PACKAGES, "9.0 or more"),
    "flash attention 3 on Ampere": (["--attn_implementation", "flash_attention_3"], AMPERE, PACKAGES, "9.0 or more"),
    "varlen on a CPU": (["--attn_implementation", "varlen"], None, PACKAGES, "needs an NVIDIA GPU"),
    "varlen on Turing": (["--attn_implementation", "varlen", "--dtype", "float16", "--use_peft"], TURING, PACKAGES,
                         "8.0 or more"),
    "varlen in fp32": (["--attn_implementation", "varlen"], AMPERE, set(), "launch with --mixed_precision bf16"),
    "Liger on a CPU": (["--use_liger_kernel"], None, PACKAGES, "Triton kernels need a GPU"),
    "Liger that is not installed": (["--use_liger_kernel"], HOPPER, set(), "pip install liger-kernel"),
    "TF32 on a CPU": (["--tf32"], None, PACKAGES, "compute capability 8.0"),
    "TF32 on Turing": (["--tf32"], TURING, PACKAGES, "compute capability 8.0"),
    "paging without a GPU": (["--optim", "paged_adamw_8bit"], None, PACKAGES, "adamw_8bit or adamw_torch_fused"),
}
ACCEPTED = {
    "nothing": ([], None, set()),
    "flash attention 2": (["--attn_implementation", "flash_attention_2", "--packing"], AMPERE, {"flash-attn"}),
    "flash attention 3": (["--attn_implementation", "flash_attention_3"], HOPPER, {"flash-attn-3"}),
    "a hub kernel": (["--attn_implementation", "kernels-community/flash-attn2"], AMPERE, {"kernels"}),
    "Liger, TF32, flex": (["--use_liger_kernel", "--tf32", "--attn_implementation", "flex_attention"], ADA, PACKAGES),
    "packing": (["--packing"], None, set()),
    "varlen": (["--attn_implementation", "varlen", "--dtype", "bfloat16", "--use_peft", "--packing"], AMPERE, set()),
    "padding free, by length": (["--padding_free", "--train_sampling_strategy", "group_by_length"], None, set()),
}


@pytest.fixture
def problems_of(monkeypatch):
    """A function from flags, capability, packages and environment to the problems."""

    def find(flags, capability=None, packages=(), **env):
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(sys, "argv", ["llama.py", *flags])
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(preflight, "installed", lambda name: name in packages)
        device = SimpleNamespace(type="cuda" if capability else "cpu")
        accelerator = SimpleNamespace(device=device, mixed_precision="no", num_processes=1, distributed_type="NO",
                                      state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None))
        return preflight.find_problems(llama.parse_args(), accelerator)

    return find


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(name, problems_of):
    flags, capability, packages, says = REFUSED[name]
    found = problems_of(flags, capability, packages)
    assert len(found) == 1 and says in found[0] and found[0].startswith(flags[0]), found


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_can_run_is_not(name, problems_of):
    assert problems_of(*ACCEPTED[name]) == []


@pytest.mark.parametrize(("capability", "flags", "says"), [
    (None, [], "8.9 (Ada, Hopper) or more"), (AMPERE, [], "8.9 (Ada, Hopper) or more"),
    (HOPPER, ["--use_peft"], "whole weights only"), (HOPPER, [], None)])
def test_fp8_is_for_what_has_it(capability, flags, says, problems_of):
    found = problems_of(flags, capability, ACCELERATE_MIXED_PRECISION="fp8")
    assert (says in found[0] and len(found) == 1) if says else found == []


@pytest.mark.parametrize(("flags", "says"), [
    (["--packing", "--padding_free"], "choose one"),
    (["--packing", "--train_sampling_strategy", "group_by_length"], "all of one length"),
])
def test_levers_that_exclude_each_other_are_refused(flags, says, problems_of):
    found = problems_of(flags)
    assert len(found) == 1 and says in found[0]


def test_compiling_has_one_owner(problems_of):
    found = problems_of(["--torch_compile"], HOPPER, ACCELERATE_DYNAMO_BACKEND="INDUCTOR")
    assert len(found) == 1 and "the command line owns it" in found[0]
    assert problems_of(["--torch_compile"], HOPPER, ACCELERATE_DYNAMO_BACKEND="NO") == []


@pytest.mark.parametrize(("config", "says"), [
    (LlamaConfig(), None),
    (BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=16), "BloomForCausalLM"),  # knows no positions
    (OPTConfig(num_hidden_layers=1), "OPTForCausalLM"),  # takes them, and masks without
    (Qwen3Config(num_hidden_layers=1), None), (MistralConfig(num_hidden_layers=1), None),
    (Gemma2Config(num_hidden_layers=2), None), (GPT2Config(n_layer=1), None),
    (Qwen3NextConfig(), "linear_attention"),  # its state runs on
], ids=lambda value: value.model_type if hasattr(value, "model_type") else "")
def test_models_that_cannot_keep_packed_rows_apart_are_refused(config, says, capsys, monkeypatch):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for flags in (["--packing"], ["--padding_free"], ["--attn_implementation", "flash_attention_2"], []):
        monkeypatch.setattr(sys, "argv", ["llama.py", *flags])
        if not (flags and says):
            preflight.check_model(llama.parse_args(), model, 0)
            continue
        with pytest.raises(SystemExit, match="64"):
            preflight.check_model(llama.parse_args(), model, 0)
        assert says in capsys.readouterr().err


def test_a_model_whose_attention_is_not_told_where_rows_end_is_refused(capsys, monkeypatch):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]]))
    monkeypatch.setattr(sys, "argv", ["llama.py", "--packing"])  # its masks know positions
    preflight.check_model(llama.parse_args(), model, 0)
    monkeypatch.setattr(sys, "argv", ["llama.py", "--attn_implementation", "flash_attention_2"])
    with pytest.raises(SystemExit, match="64"):
        preflight.check_model(llama.parse_args(), model, 0)
    assert "do not tell their attention where rows end): use --attn_implementation sdpa" in capsys.readouterr().err


def test_a_token_without_an_embedding_is_refused(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["llama.py"])
    model = AutoModelForCausalLM.from_config(LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=16))
    preflight.check_model(llama.parse_args(), model, 15)
    with pytest.raises(SystemExit, match="64"):
        preflight.check_model(llama.parse_args(), model, 16)
    assert "the rows have a token 16, but the model has no embedding for it" in capsys.readouterr().err
