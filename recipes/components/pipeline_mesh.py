# SPDX-License-Identifier: Apache-2.0
"""The ranks of pipelines: which of them are the stages of one pipeline, and which hold the same.

With N ranks per pipeline and D pipelines, ranks 0 to D - 1 have the first stages. So the ranks that
exchange gradients or shards are neighbors, on one host if possible, and what goes from host to host
is the hidden states between stages, which are far less.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from components.pipeline_kinds import KINDS
from components.plugins import pipeline_ranks

if TYPE_CHECKING:
    from accelerate import Accelerator


class PipelineMesh:
    """The place of this rank in its pipeline, and among the pipelines.

    Attributes:
        num_ranks: ranks of each pipeline.
        rank: the place of this rank in its pipeline, from 0.
        num_pipelines: pipelines, each with rows of its own.
        pipeline: the number of this rank's pipeline.
        over_stages: the process group of this rank's pipeline.
        over_pipelines: the device mesh of the ranks that have the same stages, one per pipeline.
        ends: the process group of the first and the last rank of this pipeline; None for others.
    """

    def __init__(self, accelerator: "Accelerator") -> None:
        """Make the process groups. Every rank takes part."""
        self.num_ranks = pipeline_ranks(accelerator)
        self.num_pipelines = accelerator.num_processes // self.num_ranks
        mesh: Any = init_device_mesh(
            accelerator.device.type,
            (self.num_ranks, self.num_pipelines),
            mesh_dim_names=("stages", "pipelines"),
        )
        self.rank = mesh["stages"].get_local_rank()
        self.pipeline = mesh["pipelines"].get_local_rank()
        self.over_stages = mesh["stages"].get_group()
        self.over_pipelines = mesh["pipelines"]
        self.ends: Any = None
        last = (self.num_ranks - 1) * self.num_pipelines
        for first in range(self.num_pipelines):  # Every rank has to make every group
            group = dist.new_group([first, last + first])
            if first == self.pipeline and self.rank in (0, self.num_ranks - 1):
                self.ends = group

    def stages_under(self, schedule: str) -> list[int]:
        """Return the numbers of the stages of this rank under --pipeline_schedule."""
        return KINDS[schedule].stages_of(self.rank, self.num_ranks)

    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks of this pipeline have."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self.over_stages)
        return total

    def sum_over_pipelines(self, values: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of what belongs to the rows of all pipelines.

        Args:
            values: of this rank's pipeline, the same on all of its ranks.
        """
        total = torch.stack(list(values)).sum(0)
        dist.all_reduce(total, group=self.over_pipelines.get_group())
        return total
