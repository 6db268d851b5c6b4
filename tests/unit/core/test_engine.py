# SPDX-License-Identifier: Apache-2.0
"""Gradients add up over micro-batches and ranks, and what would be silently wrong is refused."""

import pytest
import torch

from core.engine import (
    Layout,
    backward_of_sum,
    compiling_pays,
    find_faults,
    name_of_engine,
    set_up_compiler,
)
from example_arguments import language_model_arguments
from fakes import fake_accelerator, parallelism, under


def gradient_of(loss, weight):
    """The gradient that engine and accelerate leave of one of 2 micro-batches on 3 ranks."""

    def backward(scaled):
        (scaled / 6).backward()

    accelerator = fake_accelerator(
        num_processes=3, gradient_accumulation_steps=2, backward=backward
    )
    backward_of_sum(Layout(accelerator), loss)
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_over_micro_batches_and_ranks_are_undone(dtype):
    weight = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    assert gradient_of((3 * weight).sum(), weight).tolist() == [3, 3]


@pytest.mark.parametrize("loss", [float("inf"), -float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(loss):
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    assert gradient_of(weight.sum() + loss, weight).isnan().all()


# ---- Compiled layers ----
GPU = {"device": torch.device("cuda")}
PACKED = "--packing"


@pytest.mark.parametrize(
    ("engine", "words", "settings", "sizes", "pays"),
    [
        ("DDP", PACKED, GPU, {}, True),
        ("FSDP2 FULL_SHARD", PACKED, GPU | {"is_fsdp2": True}, {}, True),
        ("DDP", PACKED, {}, {}, False),
        ("DDP", "", GPU, {}, False),
        ("DDP", "--padding_free", GPU, {}, False),
        ("DDP", f"{PACKED} --attn_implementation varlen", GPU, {}, False),
        ("DDP", f"{PACKED} --use_peft", GPU, {}, True),
        ("DDP", f"{PACKED} --use_peft --load_in_4bit", GPU, {}, False),
        ("FSDP1 FULL_SHARD", PACKED, GPU, {}, False),
        ("ZeRO-3", PACKED, GPU, {}, False),
        ("DDP", PACKED, GPU, {"tp": 2}, False),
    ],
)
def test_auto_compiles_on_gpus_where_batches_have_one_shape(engine, words, settings, sizes, pays):
    layout = Layout(under(engine, **settings), sizes)
    assert compiling_pays(language_model_arguments(*words.split()), layout) == pays


def test_auto_goes_on_where_nothing_can_be_compiled(monkeypatch):
    def fail(module):
        raise RuntimeError("no C compiler\nis here")

    said = []
    layout = Layout(fake_accelerator(**GPU, print=said.append))
    monkeypatch.setattr(torch, "compile", fail)
    set_up_compiler(language_model_arguments(PACKED), layout)
    reason = "nothing is compiled: RuntimeError: no C compiler is here"
    assert said == [f"--torch_compile auto: {reason}"]
    assert not hasattr(layout.accelerator.state, "dynamo_plugin")


# ---- What would be silently wrong ----
BF16 = {"mixed_precision": "bf16"}


def faults_of(accelerator, words=""):
    found = find_faults(language_model_arguments(*words.split()), Layout(accelerator))
    return " ".join(found)


@pytest.mark.parametrize(
    ("engine", "words", "settings", "word"),
    [
        ("DDP", "", {}, ""),
        ("DDP", "--dtype bf16", {}, "fp32 copy"),
        ("DDP", "--dtype bf16 --use_peft", {}, ""),
        ("DDP", "--dtype bf16 --no_master_weights", {}, ""),
        ("FSDP2 FULL_SHARD", "--dtype bf16", BF16, ""),
        ("FSDP2 FULL_SHARD", "--use_peft --load_in_4bit", BF16, "4-bit"),
        ("FSDP2 FULL_SHARD", "--use_peft --load_in_4bit --dtype bf16", BF16, ""),
        ("ZeRO-3", "--use_peft --load_in_4bit", BF16, "4-bit"),
        ("DDP", "", {"mixed_precision": "fp16"}, "fp16 needs a GPU"),
        ("ZeRO-2", "", {"deepspeed_config": {"gradient_accumulation_steps": 4}}, "accumulation"),
        ("ZeRO-2", "", {"deepspeed_config": {"gradient_accumulation_steps": "auto"}}, ""),
        ("ZeRO-2", "", {"deepspeed_config": {"tensor_parallel": {"autotp_size": 2}}}, "fsdp2_tp"),
        ("DDP", "", {"parallelism_config": parallelism(tp=2)}, "tp_size 2"),
    ],
)
def test_what_would_be_silently_wrong_is_named(engine, words, settings, word, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = faults_of(under(engine, **settings), words)
    assert word in found and bool(found) == bool(word)


@pytest.mark.parametrize(
    ("exported", "engine", "word"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "DDP", "FSDP"),
        ({"ACCELERATE_USE_FSDP": "true"}, "FSDP2 FULL_SHARD", ""),
        ({"WORLD_SIZE": "4"}, "DDP", "WORLD_SIZE 4"),
    ],
)
def test_what_accelerate_drops_is_named(exported, engine, word, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", **exported}.items():
        monkeypatch.setenv(name, value)
    assert word in faults_of(under(engine))
    assert bool(faults_of(under(engine))) == bool(word)


def test_fsdp1_that_trains_or_averages_nothing_is_named(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    accelerator = under("FSDP1 FULL_SHARD")
    assert not faults_of(accelerator)
    accelerator.state.fsdp_plugin.use_orig_params = False
    assert "trains nothing" in faults_of(accelerator)
    apart = under("FSDP1 HYBRID_SHARD")
    monkeypatch.setattr(torch.cpu, "device_count", lambda: 1)
    assert name_of_engine(apart) == "FSDP1 NO_SHARD"
    assert "nor average" in faults_of(apart)
