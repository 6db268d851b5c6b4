# SPDX-License-Identifier: Apache-2.0
"""Hooks of pipelines (core/extras.py): flags, layout, and what would be silently wrong."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from accelerate import Accelerator

from core.batches import takes_one_line
from core.cli import Bounds, free
from core.engine import Layout, is_sharded
from extras.pipeline.layout import PipelineLayout, make_layout
from extras.pipeline.schedules import num_microbatches

Schedule = Literal["1f1b", "gpipe", "interleaved", "interleaved_zero_bubble", "zbv"]


@dataclass(kw_only=True)
class Arguments:
    """The stages of a pipeline, and what goes through them."""

    pp_size: int = free(
        2,
        "ranks per pipeline, each with a part of the layers; all ranks divided by it are the "
        "pipelines, each with rows of its own",
        Bounds(least=2),
    )
    pipeline_schedule: Schedule = free(
        "1f1b",
        "order of forward and backward passes; interleaved, interleaved_zero_bubble and zbv have "
        "two stages per rank and idle less, the last two by computing gradients of weights later",
    )
    num_microbatches: int | None = free(
        None,
        "parts of a batch of --per_device_train_batch_size rows that are under way at a time; the "
        "more, the less the ranks wait [one for each row]",
        Bounds(least=1),
    )
    shard_stages: bool = free(
        False,
        "split the weights, gradients and optimizer state of each stage over the pipelines with "
        "FSDP2 [each pipeline has whole stages]",
    )


def layout(args: Any, accelerator: Accelerator) -> PipelineLayout:
    """Return the layout of --pp_size. Every rank takes part.

    Raises:
        ValueError: if --pp_size does not divide the ranks.
    """
    return make_layout(args, accelerator)


def find_faults(args: Any, layout: Layout) -> Iterator[str]:
    """Yield a problem for each thing under which a pipeline would train otherwise."""
    accelerator = layout.accelerator
    if is_sharded(accelerator) or accelerator.parallelism_config is not None:
        # accelerate would shard nothing here, and a mesh places ranks in another order
        yield (
            f"{layout.strategy}: a pipeline takes its ranks from --pp_size, and shards with "
            "--shard_stages: use pp.yaml"
        )
    if accelerator.mixed_precision == "fp16":
        yield "the loss scale of fp16 is not kept over stages: use mixed_precision: bf16"
    if takes_one_line(args.attn_implementation):
        yield (
            f"--attn_implementation {args.attn_implementation} takes the rows of a batch in one "
            "line, which cannot be cut into micro-batches: use sdpa"
        )
    rows = args.per_device_train_batch_size
    if rows % num_microbatches(args):
        yield (
            f"--num_microbatches {args.num_microbatches} does not divide "
            f"--per_device_train_batch_size {rows}: leave it out"
        )
