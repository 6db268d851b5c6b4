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

from components import upstream
from components.pipeline_kinds import KINDS


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
        stages = self._stages_for(shape)
        # The loss is divided by the tokens of the whole step, not by micro-batches
        schedule = getattr(pipelining, kind.class_name)(
            stages if has_several else stages[0],
            shape.num_microbatches,
            loss_fn=self.loss,
            scale_grads=False,
        )
        if has_several and not is_training:
            upstream.run_only_forward(schedule)
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
            upstream.keep_gradients_of_shards(stage)
            stages.append(stage)
        return stages
