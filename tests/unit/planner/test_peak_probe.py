# SPDX-License-Identifier: Apache-2.0
"""What a rank's tracker counts around a collective: the rank's own tensors, not those of gloo."""

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeWork
from torch.distributed._functional_collectives import all_to_all_single_autograd

from measured.peak_probe import TensorTracker, run_on_copies


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_collective_that_never_lets_go_holds_no_tensor_of_the_rank():
    held = []

    def collective(tensors):
        held.extend(tensors)
        tensors[0].mul_(2)
        return tensors, FakeWork().boxed()

    tensor = torch.ones(4)
    returned, _ = run_on_copies(collective, [tensor])
    assert returned[0] is tensor
    assert tensor.tolist() == [2, 2, 2, 2]
    assert held[0].data_ptr() != tensor.data_ptr()


def test_the_lines_of_each_exchange_are_counted(one_rank):
    """Under expert parallelism they are the tokens that arrive at a rank."""
    with TensorTracker() as tracker:
        for lines in (3, 5):
            sent = torch.ones(lines, 2)
            got = all_to_all_single_autograd(sent, [lines], [lines], dist.group.WORLD)
            assert torch.equal(got, sent)
    assert tracker.exchanged == [3, 5]


def test_collectives_under_the_tracker_give_what_they_give_without_it(one_rank):
    values = [0.0, 1.0, 2.0, 3.0]
    with TensorTracker():
        mine = torch.tensor(values)
        whole = torch.zeros(4)
        share = torch.zeros(4)
        in_place = torch.tensor(values)
        dist.all_reduce(mine)
        dist.reduce(mine, dst=0)
        dist.all_gather_into_tensor(whole, mine)
        dist.reduce_scatter_tensor(share, mine)
        dist.all_gather_into_tensor(in_place, in_place)
        dist.barrier()
    for tensor in (mine, whole, share, in_place):
        assert tensor.tolist() == values
