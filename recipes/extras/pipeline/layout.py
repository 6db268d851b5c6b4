# SPDX-License-Identifier: Apache-2.0
"""The ranks of pipelines: which of them are the stages of one pipeline, and which hold the same.

With N ranks per pipeline and D pipelines, ranks 0 to D - 1 have the first stages. So the ranks that
exchange gradients or shards are neighbors, on one host if possible, and what goes from host to host
is the hidden states between stages, which are far less.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh

from core.engine import Layout, timeout_of_groups


@dataclass(frozen=True)
class PipelineLayout(Layout):
    """Pipelines of `sizes["pp"]` ranks, each with rows of its own.

    Attributes:
        shards_stages: whether FSDP2 shards each stage over the pipelines.
        over_stages: the process group of this rank's pipeline.
        over_pipelines: the device mesh of the ranks that have the same stages, one per pipeline.
        ends: the process group of the first and the last rank of this pipeline; None for others.
    """

    shards_stages: bool = False
    over_stages: Any = None
    over_pipelines: Any = None
    ends: Any = None

    @property
    def strategy(self) -> str:
        """What really runs, such as "PP 2 x FSDP2 4"."""
        name = f"PP {self.num_ranks}"
        if self.num_pipelines == 1:
            return name
        return f"{name} x {'FSDP2' if self.shards_stages else 'replicas'} {self.num_pipelines}"

    @property
    def num_ranks(self) -> int:
        """Ranks of each pipeline."""
        return self.sizes["pp"]

    @property
    def num_pipelines(self) -> int:
        """Pipelines, each with rows of its own."""
        return self.accelerator.num_processes // self.num_ranks

    @property
    def rank(self) -> int:
        """The place of this rank in its pipeline, from 0."""
        return self.accelerator.process_index // self.num_pipelines

    @property
    def data_ranks(self) -> int:
        """The number of pipelines."""
        return self.num_pipelines

    @property
    def data_rank(self) -> int:
        """The number of this rank's pipeline."""
        return self.accelerator.process_index % self.num_pipelines

    def sum_over_stages(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sum of what the ranks of this pipeline have."""
        total = value.detach().clone()
        dist.all_reduce(total, group=self.over_stages)
        return total

    def sum_over_rows(self, value: Any) -> Any:
        """Return the sum of what belongs to the rows of all pipelines.

        Args:
            value: of this rank's pipeline, the same on all of its ranks.
        """
        total = value.clone()
        dist.all_reduce(total, group=self.over_pipelines.get_group())
        return total


def make_layout(args: Any, accelerator: Accelerator) -> PipelineLayout:
    """Make the process groups of pipelines. Every rank takes part.

    Raises:
        ValueError: if --pp_size does not divide the ranks.
    """
    size = args.pp_size
    problem = why_not_divided(args, accelerator.num_processes)
    if problem:
        raise ValueError(problem)
    timeout = timeout_of_groups(args.ddp_timeout)
    # [places in a pipeline, pipelines]
    ranks = torch.arange(accelerator.num_processes).view(size, -1)
    over_stages = group_of_this_rank(ranks.T.tolist(), timeout)
    ends = group_of_this_rank(ranks[[0, -1]].T.tolist(), timeout)
    same = group_of_this_rank(ranks.tolist(), timeout)
    return PipelineLayout(
        accelerator,
        {"pp": size},
        args.shard_stages,
        over_stages,
        DeviceMesh.from_group(same, accelerator.device.type),
        ends,
    )


def why_not_divided(args: Any, ranks: int) -> str:
    """Return why so many ranks do not make whole pipelines, or ""."""
    if ranks % args.pp_size == 0:
        return ""
    return (
        f"--pp_size {args.pp_size} does not divide {ranks} ranks: pass another --pp_size, or "
        "another --num_processes to accelerate launch"
    )


def group_of_this_rank(groups: Sequence[Sequence[int]], timeout: timedelta) -> Any:
    """Make process groups, as every rank has to, and return that of this rank, or None."""
    own = None
    for ranks in groups:
        group = dist.new_group(sorted(set(ranks)), timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own
