# SPDX-License-Identifier: Apache-2.0
"""Find what makes a pipeline impossible, before the model is loaded."""

from collections.abc import Iterator

from accelerate import Accelerator

from components.arguments import CommonArguments, PipelineTrainingArguments
from components.batches import counted
from components.pipeline_kinds import num_microbatches, why_not_scheduled
from components.strategy import Strategy


def find_pipeline_problems(args: CommonArguments, accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem, with its fix, for each thing that does not fit a pipeline."""
    if not isinstance(args, PipelineTrainingArguments):
        return
    strategy = Strategy.of(accelerator)
    if strategy.is_sharded:
        yield (
            f"{strategy.name} does not shard a pipeline: use pp.yaml, with --shard_stages for "
            "FSDP2 within each stage"
        )
    if accelerator.parallelism_config is not None:
        # Its sizes place ranks in another order than pipelines do, which would then mix up rows
        yield (
            "parallelism_config: a pipeline takes its ranks from --pp_size: use pp.yaml, whose "
            "ranks beyond one pipeline are replicas"
        )
    ranks = accelerator.num_processes
    if ranks % args.pp_size:
        yield (
            f"--pp_size {args.pp_size} does not divide {counted(ranks, 'rank')}: "
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


def how_to_divide(size: int, ranks: int, flag: str = "--pp_size") -> str:
    """Return what to do about ranks that do not make whole groups of this size.

    Args:
        flag: the argument with the size.
    """
    fitting = [fit for fit in range(2, ranks + 1) if ranks % fit == 0]
    launched = f"--num_processes {max(ranks // size, 1) * size} to accelerate launch"
    if not fitting:
        return f"pass {launched}"
    nearest = min(fitting, key=lambda fit: abs(fit - size))
    return f"use {flag} {nearest}, or pass {launched}"


def find_microbatch_problems(args: PipelineTrainingArguments) -> Iterator[str]:
    """Yield a problem for each reason why a batch cannot be cut into the micro-batches."""
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
