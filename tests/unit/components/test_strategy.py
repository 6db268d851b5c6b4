# SPDX-License-Identifier: Apache-2.0
"""Gradients add up over micro-batches and ranks, and are not finite if a loss is not."""

import pytest
import torch
from accelerate import Accelerator

import llama_pipeline
import mixtral
from components.strategy import (
    PipelineAccelerator,
    Strategy,
    backward_of_sum,
    new_accelerator,
)
from core.cli import parse
from fakes import fake_accelerator


def gradient_of(loss, weight):
    """The gradient that engine and accelerate leave of one of 2 micro-batches on 3 ranks."""

    def backward(scaled):
        (scaled / 6).backward()

    accelerator = fake_accelerator(
        num_processes=3, gradient_accumulation_steps=2, backward=backward
    )
    backward_of_sum(accelerator, loss)
    return weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_over_micro_batches_and_ranks_are_undone(dtype):
    weight = torch.tensor([1.0, 2.0], dtype=dtype, requires_grad=True)
    assert gradient_of((3 * weight).sum(), weight).tolist() == [3, 3]


@pytest.mark.parametrize("loss", [float("inf"), -float("inf"), float("nan")])
def test_a_loss_that_is_not_finite_has_no_finite_gradient(loss):
    weight = torch.tensor([1.0, 2.0], requires_grad=True)
    assert gradient_of(weight.sum() + loss, weight).isnan().all()


@pytest.mark.parametrize(
    ("flags", "ranks", "name"),
    [
        ([], 2, "PP 2"),
        (["--pp_size", "4"], 8, "PP 4 x replicas 2"),
        (["--shard_stages"], 8, "PP 2 x FSDP2 4"),
    ],
)
def test_a_pipeline_is_named_with_what_it_is_combined_with(flags, ranks, name, monkeypatch):
    monkeypatch.setattr(PipelineAccelerator, "num_processes", ranks)
    args = parse(llama_pipeline.Arguments, words=flags)
    strategy = Strategy.of(new_accelerator(args))
    assert strategy.name == name and not strategy.is_sharded
    assert strategy.pipeline == args.pp_size and strategy.shards_stages == args.shard_stages


@pytest.mark.parametrize(("size", "name"), [(1, "DDP"), (2, "DDP x EP 2")])
def test_spread_experts_are_named(size, name, monkeypatch):
    monkeypatch.setattr(Accelerator, "num_processes", 4)
    args = parse(mixtral.Arguments, words=["--ep_size", str(size)])
    strategy = Strategy.of(new_accelerator(args))
    assert strategy.name == name and not strategy.is_sharded
    assert strategy.is_split == (size > 1)
