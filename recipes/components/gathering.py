# SPDX-License-Identifier: Apache-2.0
"""Bring the parts of a tensor that is spread over ranks to one of them, its owner.

No other rank ever holds the whole tensor. The ranks send in all-to-alls in which only one of them
receives something. Unlike a gather, that takes parts of different lengths and fills one buffer.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import _StridedShard

Bounds = tuple[int, int]  # (start, stop) along a dimension


def gather_parts(
    part: torch.Tensor, lengths: Sequence[int], owner: int, group: Any
) -> torch.Tensor:
    """Return parts of different lengths on their owner, end to end in the order of the ranks.

    Every rank of the group takes part.

    Args:
        part: this rank's, [its length], on the device on which the group communicates.
        lengths: of the parts of all ranks of the group, in elements.
        owner: its rank in the run. If it is not in the group, nothing is sent.

    Returns:
        [sum(lengths)] on the owner, [0] on other ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    if owner not in ranks:
        return part.new_empty(0)
    # As bytes, since not every backend sends every dtype
    sent = part.detach().contiguous().view(torch.uint8)
    to_ranks = [0] * len(ranks)
    to_ranks[ranks.index(owner)] = sent.numel()
    from_ranks = [0] * len(ranks)
    if dist.get_rank() == owner:
        from_ranks = [length * part.element_size() for length in lengths]
    received = sent.new_empty(sum(from_ranks))
    dist.all_to_all_single(received, sent, from_ranks, to_ranks, group=group)
    return received.view(part.dtype)


# ---- DTensor ----
def gather_shards(tensor: DTensor, owner: int) -> torch.Tensor:
    """Return a DTensor whole on its owner. Every rank that has a shard takes part.

    Shards are joined along one dimension of the mesh after another, the last one first, on the
    ranks that have the owner's place in it. Where there are copies, only those ranks send that are
    in the owner's copy.

    Args:
        owner: its rank in the run.

    Returns:
        The whole tensor on the owner, on its device; what other ranks get is not the whole.
    """
    mesh = tensor.device_mesh
    # Shards that are offloaded to the host are sent from the device.
    part = tensor.to_local().detach().to(mesh.device_type)
    own_place: Any = mesh.get_coordinate()
    places = (mesh.mesh == owner).nonzero().tolist()
    if not places:  # The owner has another copy.
        return part
    owners_place = places[0]
    shapes = shapes_of_parts(tensor, own_place)
    sharded = []
    for dim, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            sharded.append(dim)
        elif own_place[dim] != owners_place[dim]:
            return part
    for dim in reversed(sharded):
        part = join_shards(part, tensor, dim, shapes[dim], owners_place[dim])
        if own_place[dim] != owners_place[dim]:
            return part
    return part


def shapes_of_parts(tensor: DTensor, place: Sequence[int]) -> list[list[int]]:
    """Return the shapes of what a rank has, before each dimension of the mesh splits it further.

    Args:
        place: of the rank, in the mesh.
    """
    shape = list(tensor.shape)
    shapes = []
    for dim, placement in enumerate(tensor.placements):
        shapes.append(list(shape))
        if not isinstance(placement, Replicate):
            along: Any = placement
            own = pieces_along(tensor, dim, shape)[place[dim]]
            shape[along.dim] = sum(stop - start for start, stop in own)
    return shapes


def pieces_along(tensor: DTensor, dim: int, shape: Sequence[int]) -> list[list[Bounds]]:
    """Return what each place along a dimension of the mesh has of a part of a DTensor.

    Args:
        dim: of the mesh.
        shape: of the part.
    """
    placement: Any = tensor.placements[dim]
    number = tensor.device_mesh.size(dim)
    blocks = [(0, shape[placement.dim])]
    if isinstance(placement, _StridedShard):  # Each of some blocks is split over the ranks.
        blocks = chunks_of(0, shape[placement.dim], int(placement.split_factor))
    pieces: list[list[Bounds]] = [[] for _ in range(number)]
    for start, stop in blocks:
        for place, chunk in enumerate(chunks_of(start, stop, number)):
            pieces[place].append(chunk)
    return pieces


def chunks_of(start: int, stop: int, number: int) -> list[Bounds]:
    """Return the bounds of chunks as torch.chunk cuts them; the last ones may be empty."""
    size = -(-(stop - start) // number)
    chunks = []
    for chunk in range(number):
        first = min(start + chunk * size, stop)
        chunks.append((first, min(first + size, stop)))
    return chunks


def join_shards(
    part: torch.Tensor, tensor: DTensor, dim: int, shape: Sequence[int], place: int
) -> torch.Tensor:
    """Return the shards along one dimension of the mesh, joined on one rank of their group.

    Args:
        part: this rank's shard.
        dim: of the mesh.
        shape: of what the shards are joined to.
        place: along that dimension, of the rank that gets it.
    """
    group = tensor.device_mesh.get_group(dim)
    receiver = dist.get_process_group_ranks(group)[place]
    placement: Any = tensor.placements[dim]
    before, after = shape[: placement.dim], shape[placement.dim + 1 :]
    pieces = pieces_along(tensor, dim, shape)
    lengths = [sum(stop - start for start, stop in own) for own in pieces]
    sizes = [torch.Size([*before, length, *after]).numel() for length in lengths]
    received = gather_parts(part.reshape(-1), sizes, receiver, group)
    if dist.get_rank() != receiver:
        return received
    if placement.dim == 0 and not isinstance(placement, _StridedShard):
        return received.view(*shape)  # The shards are rows, one after another.
    whole = received.new_empty(shape)
    for own, length, shard in zip(pieces, lengths, received.split(sizes), strict=True):
        remaining = shard.view(*before, length, *after)
        for start, stop in own:
            piece, remaining = remaining.tensor_split([stop - start], placement.dim)
            whole.narrow(placement.dim, start, stop - start).copy_(piece)
    return whole
