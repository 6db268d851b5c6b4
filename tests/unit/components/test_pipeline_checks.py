# SPDX-License-Identifier: Apache-2.0
"""What cannot run as a pipeline is refused in a line with a way that works."""

import sys
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

import llama_pipeline
from components.cli import parse_arguments
from components.mesh_checks import NAMES, find_mesh_misfits
from components.pipeline_checks import (
    find_misfits_of_size,
    find_pipeline_problems,
    layers_of_model,
)
from components.strategy import Strategy
from fakes import fake_accelerator, parallelism


@pytest.fixture
def problems_of(monkeypatch):
    """A function from ranks and flags to the problems that are found."""

    def find(ranks, *words, strategy=None, precision="no", mesh=None, layers=None):
        monkeypatch.setattr(sys, "argv", ["llama_pipeline.py"])
        args = parse_arguments(llama_pipeline.Arguments, words=list(words))
        in_force = strategy or Strategy("PP", pipeline=args.pp_size)
        monkeypatch.setattr("components.pipeline_checks.Strategy.of", lambda _: in_force)
        accelerator = SimpleNamespace(
            num_processes=ranks, mixed_precision=precision, parallelism_config=mesh
        )
        return list(find_pipeline_problems(args, accelerator, layers))

    return find


@pytest.mark.parametrize(
    ("ranks", "words", "says"),
    [
        (
            1,
            [],
            "--pp_size 2 does not divide 1 rank: pass --num_processes 2 to accelerate launch",
        ),
        (
            6,
            ["--pp_size", "4"],
            "--pp_size 4 does not divide 6 ranks: use --pp_size 3, or pass --num_processes 4 to "
            "accelerate launch",
        ),
        (
            2,
            ["--shard_stages"],
            "--shard_stages shards over pipelines, and 2 ranks are one: pass --num_processes 4 to "
            "accelerate launch, or leave it out",
        ),
        (
            2,
            ["--num_microbatches", "3"],
            "--num_microbatches 3 does not divide --per_device_train_batch_size 8: use "
            "--num_microbatches 2",
        ),
        (
            4,
            ["--pp_size", "4", "--num_microbatches", "2"],
            "--num_microbatches 2: 1f1b needs at least 4, one for each stage: use "
            "--num_microbatches 4",
        ),
        (
            2,
            ["--per_device_train_batch_size", "5", "--pipeline_schedule", "interleaved"],
            "--per_device_train_batch_size 5 makes 5 micro-batches: interleaved runs them in "
            "equal rounds of at least 2: use --per_device_train_batch_size 4",
        ),
        (
            4,
            ["--shard_stages", "--optim", "adamw_8bit"],
            "--optim adamw_8bit cannot hold shards: use adamw_torch_fused",
        ),
    ],
)
def test_ranks_and_micro_batches_that_do_not_fit_are_refused(ranks, words, says, problems_of):
    assert problems_of(ranks, *words) == [says]


@pytest.mark.parametrize(
    ("ranks", "words", "cure"),
    [
        (8, ["--pp_size", "8"], "use --pp_size 4"),
        (
            8,
            ["--pp_size", "4", "--pipeline_schedule", "interleaved"],
            "use --pipeline_schedule 1f1b",
        ),
        (3, ["--pp_size", "6"], "use --pp_size 3, or"),
        (7, ["--pp_size", "7"], "use --pp_size 4 and pass --num_processes 4 to accelerate launch"),
    ],
)
def test_stages_are_no_more_than_the_layers_of_the_model(ranks, words, cure, tmp_path, problems_of):
    LlamaConfig(num_hidden_layers=4).save_pretrained(tmp_path)
    args = parse_arguments(
        llama_pipeline.Arguments, words=["--model_name_or_path", str(tmp_path), *words]
    )
    layers = layers_of_model(args)
    assert layers == 4
    [problem] = find_misfits_of_size(args, ranks, layers)
    assert f": {cure}".removesuffix(", or") in problem
    assert problems_of(4, "--pp_size", "4", layers=layers) == []


def test_another_engine_is_refused(problems_of):
    [problem] = problems_of(2, strategy=Strategy("FSDP2 FULL_SHARD", fsdp_version=2))
    assert problem.startswith("FSDP2 FULL_SHARD does not shard a pipeline: use pp.yaml")


@pytest.mark.parametrize("sizes", [{"dp_replicate": 4}, {"tp": 4}, {}])
def test_a_mesh_of_the_yaml_is_refused(sizes, problems_of):
    [problem] = problems_of(4, mesh=parallelism(**sizes))
    assert problem.startswith("parallelism_config: a pipeline takes its ranks from --pp_size")


@pytest.mark.parametrize("kind", ["tp", "cp"])
def test_a_group_that_shares_rows_is_refused_with_the_yaml_of_pipelines(kind):
    accelerator = fake_accelerator(num_processes=2, parallelism_config=parallelism(**{kind: 2}))
    args = parse_arguments(llama_pipeline.Arguments, words=[])
    found = list(find_mesh_misfits(args, accelerator, Strategy("a mesh", is_split=True)))
    assert f"this recipe has no {NAMES[kind]} parallelism: use pp.yaml" in found


def test_the_loss_scale_of_fp16_is_refused(problems_of):
    [problem] = problems_of(2, precision="fp16")
    assert problem.endswith("use mixed_precision: bf16")


def test_what_fits_is_not_refused(problems_of):
    assert problems_of(2) == []
    assert problems_of(8, "--pp_size", "4", "--shard_stages", "--pipeline_schedule", "zbv") == []


def test_adapters_are_refused():
    args = parse_arguments(llama_pipeline.Arguments, words=["--use_peft"])
    [problem] = args.find_own_conflicts()
    assert "for adapters use recipes/llama.py, with fsdp2_full_shard.yaml" in problem
