# SPDX-License-Identifier: Apache-2.0
"""A tensor that is spread over ranks is whole on its owner, bit for bit, and on no other rank."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from components.gathering import chunks_of, gather_parts, gather_shards
from ranks import on_ranks

ROWS, COLUMNS = Shard(0), Shard(1)
COPIES = Replicate()
CASES = {  # mesh, placements, shape
    "FSDP2": ((4,), [ROWS], (8, 3)),
    "rows that do not divide": ((4,), [ROWS], (9, 3)),
    "fewer rows than ranks": ((4,), [ROWS], (2, 3)),
    "a vector": ((4,), [ROWS], (5,)),
    "columns": ((4,), [COLUMNS], (3, 8)),
    "columns that do not divide": ((4,), [COLUMNS], (3, 7)),
    "HSDP": ((2, 2), [COPIES, ROWS], (5, 3)),
    "copies of a stage": ((2, 2), [ROWS, COPIES], (5, 3)),
    "copies on all ranks": ((4,), [COPIES], (5, 3)),
    "FSDP2 and TP by columns": ((2, 2), [ROWS, COLUMNS], (5, 7)),
    "FSDP2 and TP by rows": ((2, 2), [_StridedShard(0, split_factor=2), ROWS], (8, 3)),
    "rows within rows": ((2, 2), [ROWS, ROWS], (7, 3)),
    "joined matrices": ((4,), [_StridedShard(1, split_factor=2)], (3, 16)),
    "experts": ((2, 2), [COLUMNS, ROWS], (4, 6, 2)),
}


def spread(mesh, placements, shape, dtype=torch.float32):
    """A tensor with -0.0 in it, and its DTensor."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape).to(dtype)
    if dtype.is_floating_point:
        whole.view(-1)[-1] = -0.0
    mesh = init_device_mesh("cpu", mesh)
    return whole, distribute_tensor(whole, mesh, placements, src_data_rank=None)


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).tolist()


def gathered_by_each_owner():
    """The cases and owners that failed on this rank."""
    failed = []
    for name, case in CASES.items():
        whole, tensor = spread(*case)
        for owner in range(dist.get_world_size()):
            found = gather_shards(tensor, owner)
            if dist.get_rank() == owner:
                is_right = found.shape == whole.shape and as_bytes(found) == as_bytes(whole)
            else:
                has_copy = all(isinstance(placement, Replicate) for placement in tensor.placements)
                is_right = has_copy or found.numel() < whole.numel()
            if not is_right:
                failed.append((name, owner))
    return failed


def of_other_dtypes():
    """The dtypes that failed on this rank."""
    failed = []
    for dtype in (torch.bfloat16, torch.int64, torch.uint8, torch.bool):
        whole, tensor = spread((4,), [ROWS], (6, 2), dtype)
        found = gather_shards(tensor, 1)
        if dist.get_rank() == 1 and not torch.equal(found, whole):
            failed.append(dtype)
    return failed


def of_groups():
    """What the ranks of two groups get, if rank 3 is the owner."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    part = torch.full((1 + rank % 2,), float(rank))
    return gather_parts(part, [1, 2], 3, groups[rank // 2]).tolist()


def on_a_mesh_of_its_own():
    """The experts of ranks that have them between them; others have copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "ep"))["ep"]
    part = torch.full((2, 3), float(dist.get_rank() % 2))
    return gather_shards(DTensor.from_local(part, mesh, [ROWS]), 2).flatten().tolist()


def test_shards_are_whole_on_their_owner_only():
    def gather_all():
        return (
            gathered_by_each_owner(),
            of_other_dtypes(),
            of_groups(),
            on_a_mesh_of_its_own(),
        )

    failed, of_dtypes, of_group, of_experts = zip(*on_ranks(gather_all, 4), strict=True)
    assert failed == ([], [], [], [])
    assert of_dtypes == ([], [], [], [])
    assert of_group == ([], [], [], [2.0, 3.0, 3.0])
    assert of_experts[2] == [0.0] * 6 + [1.0] * 6
    assert all(len(found) < 12 for rank, found in enumerate(of_experts) if rank != 2)


@pytest.mark.parametrize("length", range(10))
@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_chunks_are_those_of_torch(length, number):
    lengths = [chunk.numel() for chunk in torch.arange(length).chunk(number)] if length else []
    lengths += [0] * (number - len(lengths))
    found = chunks_of(3, 3 + length, number)
    assert [stop - start for start, stop in found] == lengths
    assert all(3 <= start <= stop <= 3 + length for start, stop in found)
