# SPDX-License-Identifier: Apache-2.0
"""The ranks of pipelines: which of them are the stages of one pipeline, and which hold the same.

With N ranks per pipeline and D pipelines, ranks 0 to D - 1 have the first stages. So the ranks that
exchange gradients or shards are neighbors, on one host if possible, and what goes from host to host
is the hidden states between stages, which are far less.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh

from components.pipeline_kinds import KINDS
from components.plugins import pipeline_ranks
from components.strategy import timeout_of_groups


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

    def __init__(self, accelerator: Accelerator, ddp_timeout: int) -> None:
        """Make the process groups. Every rank takes part.

        Args:
            ddp_timeout: seconds that ranks wait for each other.
        """
        self._timeout = timeout_of_groups(ddp_timeout)
        self.num_ranks = pipeline_ranks(accelerator)
        self.num_pipelines = accelerator.num_processes // self.num_ranks
        self.rank, self.pipeline = divmod(accelerator.process_index, self.num_pipelines)
        # [places in a pipeline, pipelines]
        ranks = torch.arange(accelerator.num_processes).view(self.num_ranks, -1)
        self.over_stages = self._group_of_this_rank(ranks.T.tolist())
        self.ends = self._group_of_this_rank(ranks[[0, -1]].T.tolist())
        group = self._group_of_this_rank(ranks.tolist())
        self.over_pipelines = DeviceMesh.from_group(group, accelerator.device.type)

    def _group_of_this_rank(self, groups: Sequence[Sequence[int]]) -> Any:
        """Make process groups, as every rank has to, and return that of this rank, or None."""
        own = None
        for ranks in groups:
            group = dist.new_group(sorted(set(ranks)), timeout=self._timeout)
            if dist.get_rank() in ranks:
                own = group
        return own

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
