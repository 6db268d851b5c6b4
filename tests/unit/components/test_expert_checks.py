# SPDX-License-Identifier: Apache-2.0
"""What cannot be trained with spread experts is refused in a line with a way that works."""

import sys

import pytest
import torch
from transformers import LlamaConfig, MixtralConfig, NllbMoeConfig

import mixtral
from components.cli import parse_arguments
from components.expert_checks import (
    find_expert_problems,
    find_misfits_of_config,
    find_misfits_of_fsdp,
    number_of_experts,
)
from components.strategy import Strategy
from fakes import fake_accelerator, parallelism


@pytest.fixture
def problems_of(monkeypatch, tmp_path):
    """A function from ranks and flags to the problems of a mixture with 4 experts."""
    MixtralConfig(num_local_experts=4).save_pretrained(tmp_path)

    def find(ranks, *words, strategy=None, **accelerator):
        monkeypatch.setattr(sys, "argv", ["mixtral.py"])
        model = ["--model_name_or_path", str(tmp_path)]
        args = parse_arguments(mixtral.Arguments, words=[*model, *words])
        in_force = strategy or Strategy("DDP x EP", is_split=True)
        monkeypatch.setattr("components.expert_checks.Strategy.of", lambda _: in_force)
        monkeypatch.setattr("components.expert_checks.fsdp_plugin", lambda _: None)
        fake = fake_accelerator(num_processes=ranks, **{"mixed_precision": "bf16"} | accelerator)
        return list(find_expert_problems(args, fake))

    return find


def test_what_fits_is_not_refused(problems_of):
    assert problems_of(4, "--ep_size", "2") == problems_of(4, "--ep_size", "4") == []
    assert problems_of(3) == []
    adapters_elsewhere = ["--use_peft", "--lora_target_parameters"]
    assert problems_of(2, "--ep_size", "2", *adapters_elsewhere) == []


@pytest.mark.parametrize(
    ("ranks", "words", "says"),
    [
        (
            6,
            ["--ep_size", "4"],
            "--ep_size 4 does not divide 6 ranks: use --ep_size 2, or pass --num_processes 4 to "
            "accelerate launch",
        ),
        (
            1,
            ["--ep_size", "2"],
            "--ep_size 2 does not divide 1 rank: pass --num_processes 2 to accelerate launch",
        ),
        (
            6,
            ["--ep_size", "3"],
            "--ep_size 3 does not divide the model's 4 experts: use --ep_size 2",
        ),
        (
            2,
            ["--ep_size", "2", "--optim", "adamw_8bit"],
            "--optim adamw_8bit cannot hold parts of experts: use adamw_torch_fused",
        ),
    ],
)
def test_sizes_and_optimizers_that_do_not_fit_are_refused(ranks, words, says, problems_of):
    assert problems_of(ranks, *words) == [says]


def test_adapters_of_experts_and_fp16_are_refused(problems_of):
    [adapters] = problems_of(2, "--ep_size", "2", "--use_peft")
    assert "--lora_target_parameters without a value" in adapters
    [precision] = problems_of(2, "--ep_size", "2", mixed_precision="fp16")
    assert "mixed_precision: bf16" in precision


@pytest.mark.parametrize(
    "strategy",
    [Strategy("DeepSpeed ZeRO-3", zero_stage=3), Strategy("FSDP1 FULL_SHARD", fsdp_version=1)],
)
def test_engines_that_cannot_leave_experts_alone_are_refused(strategy, problems_of):
    [problem] = problems_of(2, "--ep_size", "2", strategy=strategy)
    assert strategy.name in problem and "use ep.yaml" in problem


@pytest.mark.parametrize(
    ("sizes", "version", "says"),
    [({"tp": 2}, 0, "share rows"), ({"dp_replicate": 2}, 2, "leave parallelism_config_dp_rep")],
)
def test_meshes_are_refused(sizes, version, says, problems_of):
    strategy = Strategy("a mesh", fsdp_version=version)
    mesh = parallelism(**sizes)
    [problem] = problems_of(4, "--ep_size", "2", strategy=strategy, parallelism_config=mesh)
    assert says in problem


def test_settings_of_fsdp_that_do_not_fit_are_refused():
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    assert list(find_misfits_of_fsdp(plugin)) == list(find_misfits_of_fsdp(None)) == []
    plugin.cpu_ram_efficient_loading = True
    plugin.cpu_offload = torch.distributed.fsdp.CPUOffloadPolicy(pin_memory=False)
    loading, offload = find_misfits_of_fsdp(plugin)
    assert "fsdp_cpu_ram_efficient_loading: false" in loading
    assert "fsdp_offload_params: false" in offload


def test_models_without_experts_or_a_plan_are_refused():
    [dense] = find_misfits_of_config(LlamaConfig(), 2)
    assert dense.startswith("--ep_size: a llama model has no experts")
    [no_plan] = find_misfits_of_config(NllbMoeConfig(), 2)
    assert "no plan by which to spread the experts of a nllb-moe model" in no_plan
    assert number_of_experts(MixtralConfig(num_local_experts=6)) == 6
