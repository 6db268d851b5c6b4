# SPDX-License-Identifier: Apache-2.0
"""Find what makes a pipeline impossible, before the model is loaded."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from accelerate import Accelerator

from components.batches import counted
from components.arguments import CommonArguments, PipelineArguments
from components.exits import Exit
from components.pipeline_schedules import KINDS, why_not_scheduled
from components.pipeline_stages import Stage, cut_into_stages, why_not_cut
from components.status import fail
from components.strategy import Strategy


def find_pipeline_problems(args: CommonArguments, accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem, with its fix, for each thing that does not fit a pipeline."""
    if not isinstance(args, PipelineArguments):
        return
    strategy = Strategy.of(accelerator)
    if strategy.is_sharded:
        yield (
            f"{strategy.name} does not shard a pipeline: use pp.yaml, with --shard_stages for "
            "FSDP2 within each stage"
        )
    ranks = accelerator.num_processes
    if ranks % args.pp_size:
        yield (
            f"--pp_size {args.pp_size} does not divide {ranks} rank{'s' if ranks > 1 else ''}: "
            f"{how_to_divide(args.pp_size, ranks)}"
        )
    elif args.shard_stages and ranks == args.pp_size:
        yield (
            f"--shard_stages shards over pipelines, and {ranks} ranks are one: pass "
            f"--num_processes {2 * ranks} to accelerate launch, or leave it out"
        )
    if accelerator.mixed_precision == "fp16":
        yield "the loss scale of fp16 is not kept over stages: use mixed_precision: bf16"
    yield from find_microbatch_problems(args)


def how_to_divide(pp_size: int, ranks: int) -> str:
    """Return what to do about ranks that do not make whole pipelines."""
    fitting = [size for size in range(2, ranks + 1) if ranks % size == 0]
    launched = f"--num_processes {max(ranks // pp_size, 1) * pp_size} to accelerate launch"
    if not fitting:
        return f"pass {launched}"
    nearest = min(fitting, key=lambda size: abs(size - pp_size))
    return f"use --pp_size {nearest}, or pass {launched}"


def find_microbatch_problems(args: PipelineArguments) -> Iterator[str]:
    """Yield a problem for each reason why a batch cannot be cut into the micro-batches."""
    assert isinstance(args, CommonArguments)
    rows = args.per_device_train_batch_size
    number = num_microbatches(args)
    if rows % number:
        divisors = [size for size in range(1, rows + 1) if rows % size == 0]
        nearest = min(divisors, key=lambda size: abs(size - number))
        yield (
            f"--num_microbatches {number} does not divide --per_device_train_batch_size {rows}: "
            f"use {nearest}"
        )
    reason = why_not_scheduled(args.pipeline_schedule, args.pp_size, number)
    if reason:
        given = f"--num_microbatches {number}"
        if args.num_microbatches is None:
            given = f"--per_device_train_batch_size {number} makes {number} micro-batches"
        yield f"{given}: {reason}"
    if args.shard_stages and args.optim.endswith("bit"):
        yield f"--optim {args.optim} cannot hold shards: use adamw_torch_fused"


def num_microbatches(args: PipelineArguments) -> int:
    """Return how many micro-batches are in a batch: --num_microbatches, or one for each row."""
    assert isinstance(args, CommonArguments)
    return args.num_microbatches or args.per_device_train_batch_size


def check_stages(args: PipelineArguments, model: Any) -> list[Stage]:
    """Return the stages of a model; end with 64 if it cannot be cut into them.

    Args:
        model: of transformers, whole; its parameters may be on the meta device.
    """
    assert isinstance(args, CommonArguments)
    kind = type(model).__name__
    reason = why_not_cut(copy.deepcopy(model))
    if reason:
        fail(
            Exit.USAGE,
            f"--model_name_or_path {args.model_name_or_path}: {kind} cannot be cut into stages, "
            f"since {reason}: train it with recipes/llama.py under fsdp2_full_shard.yaml",
        )
    per_rank = KINDS[args.pipeline_schedule].stages_per_rank
    num_stages = args.pp_size * per_rank
    num_layers = len(model.base_model.layers)
    if num_stages > num_layers:
        cure = f"use --pp_size {num_layers // per_rank}"
        if num_layers // per_rank < 2:
            cure = "use --pipeline_schedule 1f1b, which has one stage per rank"
        if num_layers < 2:
            cure = "use recipes/llama.py"
        fail(
            Exit.USAGE,
            f"--pp_size {args.pp_size} with {args.pipeline_schedule} makes {num_stages} stages, "
            f"and the model has {num_layers} layers: {cure}",
        )
    if args.shard_stages and KINDS[args.pipeline_schedule].is_folded:
        if model.config.tie_word_embeddings:
            fail(
                Exit.USAGE,
                "--shard_stages: embedding and output head of this model share their weight, which "
                f"{args.pipeline_schedule} has in two stages of one rank: use "
                "--pipeline_schedule interleaved_zero_bubble",
            )
    return cut_into_stages(num_layers, num_stages)


def describe_pipeline(args: PipelineArguments, stages: Sequence[Stage]) -> str:
    """Return a line of the start summary: the stages, the schedule and the micro-batches.

    Args:
        stages: of the whole pipeline.
    """
    assert isinstance(args, CommonArguments)
    layers = " + ".join(str(len(stage.layers)) for stage in stages)
    number = num_microbatches(args)
    rows = args.per_device_train_batch_size // number
    return (
        f"{len(stages)} stages of {layers} layers on {args.pp_size} ranks, "
        f"{args.pipeline_schedule}, each batch in {number} parts of {counted(rows, 'row')}"
    )
