# SPDX-License-Identifier: Apache-2.0
"""Weights are in host memory as rarely as possible: which rank reads them, and where to."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from core.engine import Layout
from core.weights import fingerprint_of_weights, load_pretrained
from fakes import small_llama, under

GPU = torch.device("cuda", 1)


def options_of(accelerator, **options):
    """What load_pretrained hands to from_pretrained."""
    seen = {}
    auto_class = SimpleNamespace(from_pretrained=lambda name, **options: seen.update(options))
    load_pretrained(auto_class, Layout(accelerator), "model", **options)
    return seen


@pytest.mark.parametrize("engine", ["DDP", "ZeRO-0", "ZeRO-1", "ZeRO-2"])
def test_weights_that_stay_whole_go_straight_to_the_gpu(engine):
    assert options_of(under(engine, device=GPU))["device_map"] == {"": GPU}
    assert "device_map" not in options_of(under(engine))


@pytest.mark.parametrize("engine", ["ZeRO-3", "FSDP2 FULL_SHARD"])
def test_weights_that_are_split_do_not(engine):
    assert "device_map" not in options_of(under(engine, device=GPU))


@pytest.fixture
def folder(tmp_path):
    config = small_llama(tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_config(config, dtype="bfloat16")
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("engine", "precision", "dtype"),
    [
        ("DDP", "bf16", "float32"),
        ("ZeRO-0", "bf16", "bfloat16"),
        ("ZeRO-2", "fp16", "float16"),
        ("ZeRO-2", "no", "float32"),
        ("ZeRO-3", "bf16", "float32"),
    ],
)
def test_deepspeed_gets_the_type_to_which_it_would_cast(engine, precision, dtype):
    accelerator = under(engine, device=GPU, mixed_precision=precision)
    assert options_of(accelerator, dtype="float32")["dtype"] == dtype


def test_new_weights_are_drawn_on_the_host():
    """So that a new head is the same under every strategy: a GPU draws other numbers."""
    assert "device_map" not in options_of(under("DDP", device=GPU), id2label={0: "a"})
    assert "device_map" not in options_of(under("DDP", device=GPU), num_labels=1)
    assert "device_map" in options_of(under("DDP", device=GPU), output_loading_info=True)


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
