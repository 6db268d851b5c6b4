# SPDX-License-Identifier: Apache-2.0
"""The schedules of torch.distributed.pipelining: who computes what when, and what each one needs.

A schedule runs the forward and the backward passes of all micro-batches of one batch. Its tensors
have fixed shapes, so one is made for each shape; that takes no communication worth mentioning.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import pipelining

from extras.pipeline import workarounds


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


def num_microbatches(args: Any) -> int:
    """Return how many micro-batches are in a batch: --num_microbatches, or one for each row."""
    return args.num_microbatches or args.per_device_train_batch_size


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


@dataclass(frozen=True)
class ScheduleMaker:
    """What makes the schedules of a rank.

    Attributes:
        name: a key of KINDS.
        stages: {number of a stage: the module that computes it} of this rank.
        num_stages: of the whole pipeline.
        hidden: the hidden state of a token, [features], on the meta device.
        device: of this rank.
        group: the process group of the pipeline.
        loss: called for each micro-batch with what the last stage returns and its part of "target".
    """

    name: str
    stages: Mapping[int, torch.nn.Module]
    num_stages: int
    hidden: torch.Tensor
    device: torch.device
    group: Any
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def make(self, shape: Shape, is_training: bool) -> Any:
        """Return a schedule for batches of a shape: its step() to train, its eval() otherwise."""
        kind = KINDS[self.name]
        has_several = kind.stages_per_rank > 1
        stages: Any = self._stages_for(shape)
        if not has_several:
            (stages,) = stages
        make = getattr(pipelining, kind.class_name)
        # The loss is divided by the tokens of the whole step, not by micro-batches
        schedule = make(stages, shape.num_microbatches, loss_fn=self.loss, scale_grads=False)
        if has_several and not is_training:
            workarounds.run_only_forward(schedule)
        return schedule

    def _stages_for(self, shape: Shape) -> list[Any]:
        """Return torch's stages of this rank, which know what they receive and send."""
        tokens = torch.empty(shape.rows, shape.width, dtype=torch.long, device="meta")
        states = self.hidden.expand(shape.rows, shape.width, -1).contiguous().requires_grad_()
        stages = []
        for number, module in self.stages.items():
            stage = pipelining.PipelineStage(
                module,
                number,
                self.num_stages,
                self.device,
                input_args=tokens if number == 0 else states,
                output_args=self.hidden.sum() if number == self.num_stages - 1 else states,
                group=self.group,
            )
            workarounds.keep_gradients_of_shards(stage)
            stages.append(stage)
        return stages
