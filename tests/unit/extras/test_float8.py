# SPDX-License-Identifier: Apache-2.0
"""`--load_in_fp8`: products are those of the formula, and what is not proven is refused.

torch computes them on a CPU as on a GPU, whose own kernels evidence/gpu/test_quantized.py launches.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

import llama
from core.cli import parse
from core.engine import Layout
from core.exits import End
from core.summary import size_of
from extras.float8 import hooks
from extras.float8.linear import Float8Linear, convert
from fakes import under
from mask_probe import random_model

E4M3 = torch.float8_e4m3fn
# Of a product with rows of normal numbers: e4m3 keeps four bits. One H200 had 3.75e-2 both ways.
RELATIVE_ERROR = 4.5e-2


def by_hand(matrix):
    """The nearest numbers that a row can have whose largest is 448 in e4m3, in float64."""
    rows = []
    for row in matrix.float():
        scale = (row.abs().max() / 448).clamp(min=2.0**-126)
        rows.append((row / scale).to(E4M3).double() * scale.double())
    return torch.stack(rows)


def layer_of(dtype=torch.float32, bias=False):
    """(a linear layer, the same one in float8)"""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48, bias=bias, dtype=dtype)
    return linear, Float8Linear(linear, torch.device("cpu"), shards=False)


def distance(one, other):
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_output_and_gradient_are_those_of_the_formula(dtype):
    linear, layer = layer_of(dtype, bias=True)
    x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
    gradient = torch.randn(2, 5, 48, dtype=dtype)
    out = layer(x)
    out.backward(gradient)
    assert out.dtype == x.grad.dtype == dtype
    flat = x.detach().reshape(10, 64)
    weight = by_hand(linear.weight.detach())
    expected = (by_hand(flat) @ weight.t()).bfloat16().to(dtype) + linear.bias
    # One more rounding to bf16, which may go the other way
    torch.testing.assert_close(out.view(10, 48), expected, rtol=1e-2, atol=1e-2)
    scales = linear.weight.detach().float().abs().amax(1) / 448
    columns = by_hand(gradient.view(10, 48) * scales)
    expected = columns @ (weight / scales.double()[:, None])
    torch.testing.assert_close(x.grad.view(10, 64).double(), expected, rtol=1e-2, atol=1e-2)
    assert distance(out.view(10, 48), linear(flat)) < RELATIVE_ERROR
    exact = gradient.view(10, 48).float() @ linear.weight.detach().float()
    assert distance(x.grad.view(10, 64), exact) < RELATIVE_ERROR


def test_gradients_of_any_size_are_as_exact():
    """A loss over a million tokens has gradients that e4m3 without scales would round to zero."""
    _, layer = layer_of()
    x = torch.randn(3, 64, requires_grad=True)
    gradient = torch.randn(3, 48)
    gradient[1] = 0  # a token that is not trained on
    (large,) = torch.autograd.grad(layer(x), x, gradient)
    (small,) = torch.autograd.grad(layer(x), x, gradient * 2.0**-60)
    assert small.equal(large * 2.0**-60) and not small[1].any() and small[0].any()


def test_autocast_decides_the_type_and_the_weight_takes_a_byte():
    linear, layer = layer_of()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16
    assert layer.weight.nbytes == linear.weight.numel() == size_of(layer.weight)
    assert not layer.weight.requires_grad and list(layer.state_dict()) == ["weight"]


def test_the_layers_in_blocks_are_converted_but_those_to_be_trained():
    model = random_model("llama", "sdpa")
    convert(model, Layout(under("one process")), ["down_proj"])
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["model.layers.0.mlp.up_proj"] == "Float8Linear"
    assert kinds["model.layers.0.mlp.down_proj"] == kinds["lm_head"] == "Linear"
    odd = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(20, 32)))
    with pytest.raises(End, match="no linear layers"):
        convert(odd, Layout(under("one process")), [])


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ("", "--use_peft"),
        ("--use_peft --load_in_4bit", "--load_in_4bit: choose"),
        ("--use_peft --load_in_8bit", "--load_in_8bit: choose"),
        ("--use_peft --use_dora", "--use_dora: choose"),
    ],
)
def test_flags_that_contradict_it_are_named(words, word):
    with pytest.raises(End, match=word):
        parse(llama.Arguments, words=["--load_in_fp8", *words.split()])


@pytest.mark.parametrize(
    ("engine", "settings", "word"),
    [
        ("DDP", {}, ""),
        ("FSDP2 FULL_SHARD", {}, ""),
        ("FSDP2 FULL_SHARD", {"mixed_precision": "bf16"}, "use --dtype bfloat16"),
        ("FSDP2 FULL_SHARD", {"cpu_offload": CPUOffloadPolicy()}, "weights on the host"),
        ("FSDP1 FULL_SHARD", {}, "not proven under FSDP1"),
        ("ZeRO-2", {}, "not proven under DeepSpeed"),
        ("DDP", {"device": torch.device("cuda")}, "capability 8.9"),
    ],
)
def test_where_it_is_not_proven_it_is_refused(engine, settings, word, monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")  # It is set to false
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    args = SimpleNamespace(load_in_fp8=True, dtype="float32")
    found = " ".join(hooks.find_faults(args, Layout(under(engine, **settings))))
    assert word in found and bool(found) == bool(word)
