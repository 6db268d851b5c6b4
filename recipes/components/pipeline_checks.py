# SPDX-License-Identifier: Apache-2.0
"""Find what makes a pipeline impossible, before the model is loaded."""

from collections.abc import Callable, Iterator

from accelerate import Accelerator

from components.mesh_checks import read_model_config
from components.pipeline_kinds import (
    KINDS,
    PipelineTrainingArguments,
    num_microbatches,
    why_not_scheduled,
)
from components.strategy import Strategy
from core.arguments import CommonArguments


def find_pipeline_problems(
    args: CommonArguments, accelerator: Accelerator, layers: int | None = None
) -> Iterator[str]:
    """Yield a problem, with its fix, for each thing that does not fit a pipeline.

    Args:
        layers: of the model; None if they are not known.
    """
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
    if accelerator.mixed_precision == "fp16":
        yield "the loss scale of fp16 is not kept over stages: use mixed_precision: bf16"
    if args.shard_stages and args.optim.endswith("bit"):
        yield f"--optim {args.optim} cannot hold shards: use adamw_torch_fused"
    yield from find_misfits_of_size(args, accelerator.num_processes, layers)


def layers_of_model(args: CommonArguments) -> int | None:
    """Return how many layers the model has, or None if it is not known or there is no pipeline."""
    if not isinstance(args, PipelineTrainingArguments):
        return None
    config = read_model_config(args)
    if config is None:
        return None
    return getattr(config.get_text_config(), "num_hidden_layers", None)


def find_misfits_of_size(
    args: PipelineTrainingArguments, ranks: int, layers: int | None
) -> Iterator[str]:
    """Yield a problem if ranks, layers or micro-batches do not fit --pp_size, with a way that does.

    Args:
        ranks: of all pipelines.
        layers: of the model; None if they are not known.
    """
    size = args.pp_size
    if ranks % size:
        yield (
            f"--pp_size {size} does not divide {ranks} ranks: {another_size(args, ranks, layers)}"
        )
    elif layers is not None and not has_layers(args, size, layers):
        yield too_few_layers(args, ranks, layers)
    elif args.shard_stages and ranks == size:
        yield (
            f"--shard_stages shards over pipelines, and {ranks} ranks are one: pass "
            f"--num_processes {2 * ranks} to accelerate launch, or leave it out"
        )
    else:
        yield from find_microbatch_problems(args)


def has_layers(args: PipelineTrainingArguments, size: int, layers: int | None) -> bool:
    """Return whether the model has a layer for each stage of pipelines of this size."""
    return layers is None or size * KINDS[args.pipeline_schedule].stages_per_rank <= layers


def too_few_layers(args: PipelineTrainingArguments, ranks: int, layers: int) -> str:
    """Return what is said of a model that has fewer layers than there are stages."""
    schedule = args.pipeline_schedule
    stages = args.pp_size * KINDS[schedule].stages_per_rank
    return (
        f"--pp_size {args.pp_size} with {schedule} makes {stages} stages, and the model has "
        f"{layers} layers: {fewer_stages(args, ranks, layers)}"
    )


def fewer_stages(args: PipelineTrainingArguments, ranks: int, layers: int) -> str:
    """Return what to do about a model that has fewer layers than there are stages."""
    if args.pp_size <= layers and batch_fits(args, args.pp_size, "1f1b"):
        return "use --pipeline_schedule 1f1b, which has one stage per rank"
    return another_size(args, ranks, layers)


def another_size(args: PipelineTrainingArguments, ranks: int, layers: int | None) -> str:
    """Return which --pp_size, or number of ranks, fits a model of `layers` layers."""

    def beside(size: int) -> str | None:
        if not has_layers(args, size, layers):
            return None
        if batch_fits(args, size, args.pipeline_schedule):
            return ""
        return f" and {how_to_cut_batch(args, size)}"

    ways = how_to_divide(args.pp_size, ranks, "--pp_size", beside)
    return ways or "use recipes/llama.py under fsdp2_full_shard.yaml"


def how_to_divide(size: int, ranks: int, flag: str, beside: Callable[[int], str | None]) -> str:
    """Return what to do about ranks that do not make whole groups of this size, or "".

    Args:
        flag: the argument with the size.
        beside: what has to be set beside a size, "" if nothing; None if the size is impossible.
    """
    possible = [other for other in range(2, max(2 * size, ranks + 1)) if beside(other) is not None]
    dividing = [other for other in possible if ranks % other == 0]
    ways = []
    if dividing:
        other = nearest_to(size, [other for other in dividing if not beside(other)] or dividing)
        ways.append(f"use {flag} {other}{beside(other)}")
    if size in possible and ranks % size:
        launched = max(ranks // size, 1) * size
        ways.append(f"pass --num_processes {launched} to accelerate launch{beside(size)}")
    if not ways and possible:
        other = nearest_to(size, possible)
        launched = max(ranks // other, 1) * other
        ways.append(
            f"use {flag} {other}{beside(other)} and pass --num_processes {launched} to accelerate "
            "launch"
        )
    return ", or ".join(ways)


def nearest_to(size: int, others: list[int]) -> int:
    """Return the one of other sizes that is nearest to this one."""
    return min(others, key=lambda other: abs(other - size))


# ---- Micro-batches ----
def find_microbatch_problems(args: PipelineTrainingArguments) -> Iterator[str]:
    """Yield a problem if a batch cannot be cut into micro-batches, with what can."""
    rows = args.per_device_train_batch_size
    number = num_microbatches(args)
    given = f"--num_microbatches {number}"
    if args.num_microbatches is None:
        given = f"--per_device_train_batch_size {rows} makes {rows} micro-batches"
    reason = f": {why_not_scheduled(args.pipeline_schedule, args.pp_size, number)}"
    if rows % number:
        reason = f" does not divide --per_device_train_batch_size {rows}"
    if not batch_fits(args, args.pp_size, args.pipeline_schedule):
        yield f"{given}{reason}: use {how_to_cut_batch(args, args.pp_size)}"


def batch_fits(args: PipelineTrainingArguments, size: int, schedule: str) -> bool:
    """Return whether pipelines of this size can run the micro-batches of a batch."""
    number = num_microbatches(args)
    is_whole = args.per_device_train_batch_size % number == 0
    return is_whole and not why_not_scheduled(schedule, size, number)


def how_to_cut_batch(args: PipelineTrainingArguments, size: int) -> str:
    """Return which number of micro-batches, or of rows if there is none, can run."""
    rows = args.per_device_train_batch_size
    fitting = []
    for number in range(1, rows + size + 1):
        if not why_not_scheduled(args.pipeline_schedule, size, number):
            fitting.append(number)
    divisors = [number for number in fitting if rows % number == 0]
    if args.num_microbatches is None:
        return f"--per_device_train_batch_size {nearest_to(rows, fitting)}"
    if divisors:
        return f"--num_microbatches {nearest_to(args.num_microbatches, divisors)}"
    return f"--per_device_train_batch_size {nearest_to(rows, fitting)} without --num_microbatches"
