# SPDX-License-Identifier: Apache-2.0
"""Weights are in host memory as rarely as possible: which rank reads them, and where to."""

import os
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    LlamaConfig,
)

from core.engine import Layout
from core.weights import fingerprint_of_weights, load_pretrained
from fakes import fake_accelerator

GPU = torch.device("cuda", 1)


def options_of(accelerator, **options):
    """What load_pretrained hands to from_pretrained."""
    seen = {}
    auto_class = SimpleNamespace(from_pretrained=lambda name, **options: seen.update(options))
    load_pretrained(auto_class, Layout(accelerator), "model", **options)
    return seen


def with_engine(stage=None, fsdp=None, **settings):
    zero = SimpleNamespace(zero_stage=stage) if stage is not None else None
    state = SimpleNamespace(deepspeed_plugin=zero, fsdp_plugin=fsdp)
    kind = DistributedType.MULTI_GPU
    if fsdp:
        kind = DistributedType.FSDP
    elif zero:
        kind = DistributedType.DEEPSPEED
    return fake_accelerator(distributed_type=kind, state=state, **settings)


@pytest.mark.parametrize("stage", [None, 0, 1, 2])
def test_weights_that_stay_whole_go_straight_to_the_gpu(stage):
    assert options_of(with_engine(stage, device=GPU))["device_map"] == {"": GPU}
    assert "device_map" not in options_of(with_engine(stage))


def test_weights_that_are_split_do_not():
    fsdp = SimpleNamespace(cpu_ram_efficient_loading=False)
    assert "device_map" not in options_of(with_engine(stage=3, device=GPU))
    assert "device_map" not in options_of(with_engine(fsdp=fsdp, device=GPU))


@pytest.fixture
def folder(tmp_path):
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    model.save_pretrained(tmp_path)
    return tmp_path


def test_a_model_whose_buffers_are_saved_is_read_by_each_rank_of_fsdp2(tmp_path, monkeypatch):
    """accelerate's fsdp2_load_full_state_dict takes them for sharded parameters, and fails."""
    shape = {
        "d_model": 8,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 8,
        "decoder_ffn_dim": 8,
        "vocab_size": 64,
    }
    BartForConditionalGeneration(BartConfig(**shape)).save_pretrained(tmp_path)
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    plugin = SimpleNamespace(cpu_ram_efficient_loading=True, ignored_modules=None)
    rank = with_engine(fsdp=plugin, num_processes=2, is_local_main_process=False, is_fsdp2=True)
    options = {"dtype": "float32", "attn_implementation": "sdpa", "output_loading_info": True}
    model, _ = load_pretrained(AutoModelForSeq2SeqLM, Layout(rank), str(tmp_path), **options)
    assert not plugin.cpu_ram_efficient_loading and model.final_logits_bias.shape == (1, 64)
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "false"


def test_modules_that_fsdp1_ignores_are_read_by_each_rank(folder, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    plugin = SimpleNamespace(cpu_ram_efficient_loading=True, ignored_modules="lm_head")
    rank = with_engine(fsdp=plugin, num_processes=2, is_local_main_process=False)
    options = {"dtype": "float32", "attn_implementation": "sdpa", "output_loading_info": True}
    model, _ = load_pretrained(AutoModelForCausalLM, Layout(rank), str(folder), **options)
    assert model.lm_head.weight.abs().sum() > 0 and not plugin.cpu_ram_efficient_loading


@pytest.mark.parametrize(
    ("stage", "precision", "dtype"),
    [
        (None, "bf16", "float32"),
        (0, "bf16", "bfloat16"),
        (2, "fp16", "float16"),
        (2, "no", "float32"),
        (3, "bf16", "float32"),
    ],
)
def test_deepspeed_gets_the_type_to_which_it_would_cast(stage, precision, dtype):
    accelerator = with_engine(stage, device=GPU, mixed_precision=precision)
    assert options_of(accelerator, dtype="float32")["dtype"] == dtype


def test_new_weights_are_drawn_on_the_host():
    """So that a new head is the same under every strategy: a GPU draws other numbers."""
    assert "device_map" not in options_of(with_engine(device=GPU), id2label={0: "a"})
    assert "device_map" not in options_of(with_engine(device=GPU), num_labels=1)
    assert "device_map" in options_of(with_engine(device=GPU), output_loading_info=True)


def test_quantized_weights_keep_the_type_that_was_asked_for():
    """DeepSpeed does not cast them."""
    accelerator = with_engine(2, device=GPU, mixed_precision="bf16")
    options = options_of(accelerator, dtype="float32", quantization_config=object())
    assert options["dtype"] == "float32"


@pytest.mark.parametrize("safe", [True, False])
def test_a_base_that_changed_is_another_one_whatever_files_it_is_read_from(safe, folder):
    tensors = load_file(folder / "model.safetensors")
    if not safe:
        (folder / "model.safetensors").unlink()

    def write():
        if safe:
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        else:
            torch.save(tensors, folder / "pytorch_model.bin")
        return fingerprint_of_weights(str(folder), "main")

    before = write()
    assert before and write() == before
    tensors["model.norm.weight"] += 1
    assert write() != before
