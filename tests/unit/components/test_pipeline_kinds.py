# SPDX-License-Identifier: Apache-2.0
"""Which stages a rank has, and which micro-batches a schedule takes."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.testing._internal.distributed.fake_pg import FakeStore

from components.pipeline_kinds import KINDS, why_not_scheduled


@pytest.fixture(params=[2, 3, 4])
def num_ranks(request):
    """A pipeline of that many ranks, of which this process is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=request.param, store=FakeStore())
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("name", KINDS)
def test_a_number_of_micro_batches_is_refused_if_and_only_if_torch_refuses_it(name, num_ranks):
    kind = KINDS[name]
    stages = []
    for number in kind.stages_of(0, num_ranks):
        stage = pipelining.PipelineStage(
            torch.nn.Identity(), number, num_ranks * kind.stages_per_rank, torch.device("cpu")
        )
        stages.append(stage)
    made_of = stages if len(stages) > 1 else stages[0]
    for number in range(1, 13):
        refusal = None
        try:
            getattr(pipelining, kind.class_name)(made_of, number, loss_fn=torch.sum)
        except ValueError as error:
            refusal = str(error)
        reason = why_not_scheduled(name, num_ranks, number)
        assert bool(reason) == bool(refusal), (number, reason, refusal)


def test_stages_are_dealt_in_turn_or_folded():
    assert [KINDS["1f1b"].stages_of(rank, 2) for rank in range(2)] == [[0], [1]]
    assert [KINDS["interleaved"].stages_of(rank, 2) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [KINDS["zbv"].stages_of(rank, 2) for rank in range(2)] == [[0, 3], [1, 2]]
