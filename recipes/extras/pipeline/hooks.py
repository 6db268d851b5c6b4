# SPDX-License-Identifier: Apache-2.0
"""Hooks of pipelines (core/extras.py): the layout, and what would be silently wrong."""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator

from core.batches import takes_one_line
from core.engine import Layout, is_sharded
from extras.pipeline.layout import PipelineLayout, make_layout
from extras.pipeline.schedules import num_microbatches


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
