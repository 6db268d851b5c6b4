# SPDX-License-Identifier: Apache-2.0
"""The schedules of torch.distributed.pipelining: who computes what when, and what each one needs.

A schedule runs the forward and the backward passes of all micro-batches of one batch. Its tensors
have fixed shapes, so one is made for each shape; that takes no communication worth mentioning.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from components import upstream


@dataclass(frozen=True)
class Kind:
    """A kind of schedule.

    Attributes:
        class_name: its class in torch.distributed.pipelining.
        stages_per_rank: how many stages a rank has.
        is_folded: whether the second half of the stages goes back over the ranks, so that the first
            rank also has the last stage.
    """

    class_name: str
    stages_per_rank: int = 1
    is_folded: bool = False

    def stages_of(self, rank: int, num_ranks: int) -> list[int]:
        """Return the numbers of the stages of a rank of a pipeline."""
        if self.is_folded:
            return [rank, 2 * num_ranks - 1 - rank]
        return [rank + turn * num_ranks for turn in range(self.stages_per_rank)]


# By --pipeline_schedule
KINDS: Mapping[str, Kind] = {
    "1f1b": Kind("Schedule1F1B"),
    "gpipe": Kind("ScheduleGPipe"),
    "interleaved": Kind("ScheduleInterleaved1F1B", stages_per_rank=2),
    "interleaved_zero_bubble": Kind("ScheduleInterleavedZeroBubble", stages_per_rank=2),
    "zbv": Kind("ScheduleZBVZeroBubble", stages_per_rank=2, is_folded=True),
}


def why_not_scheduled(name: str, num_ranks: int, num_microbatches: int) -> str:
    """Return why a schedule cannot run so many micro-batches, with one number that it can, or "".

    Args:
        name: a key of KINDS.
        num_ranks: ranks per pipeline.
    """
    if name == "1f1b" and num_microbatches < num_ranks:
        return f"1f1b needs at least {num_ranks}, one for each stage"
    if not name.startswith("interleaved"):
        return ""
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds == 0:
        return ""
    fitting = num_ranks * rounds
    return f"{name} runs them in rounds of {num_ranks}: use {fitting} or {fitting + num_ranks}"


@dataclass(frozen=True)
class Shape:
    """The shape of what goes from stage to stage.

    Attributes:
        rows: of a micro-batch.
        width: tokens of a row.
        num_microbatches: of a batch.
    """

    rows: int
    width: int
    num_microbatches: int


def make_schedule(
    name: str,
    stages: Mapping[int, torch.nn.Module],
    num_stages: int,
    shape: Shape,
    hidden: torch.Tensor,
    device: torch.device,
    group: Any,
    loss: Callable[..., torch.Tensor],
    is_training: bool,
) -> Any:
    """Return a schedule for batches of a shape: its step() for training, its eval() otherwise.

    Args:
        stages: {number of a stage: the module that computes it} of this rank.
        hidden: the hidden state of a token, [features], on the meta device.
        group: the process group of the pipeline.
        loss: called with what the last stage returns.
    """
    # The pipelining package takes a second to import, which --help does not need
    pipelining: Any = importlib.import_module("torch.distributed.pipelining")
    tokens = torch.empty(shape.rows, shape.width, dtype=torch.long, device="meta")
    states = hidden.expand(shape.rows, shape.width, -1).contiguous().requires_grad_()
    made = []
    for number, module in stages.items():
        stage = pipelining.PipelineStage(
            module,
            number,
            num_stages,
            device,
            input_args=tokens if number == 0 else states,
            output_args=hidden.sum() if number == num_stages - 1 else states,
            group=group,
        )
        upstream.keep_gradients_of_shards(stage)
        made.append(stage)
    kind = KINDS[name]
    has_several = kind.stages_per_rank > 1
    # The loss is divided by the tokens of the whole step, not by micro-batches
    schedule = getattr(pipelining, kind.class_name)(
        made if has_several else made[0],
        shape.num_microbatches,
        loss_fn=loss,
        scale_grads=False,
    )
    if has_several and not is_training:
        upstream.run_only_forward(schedule)
    return schedule
