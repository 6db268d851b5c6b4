# SPDX-License-Identifier: Apache-2.0
"""Which rank keeps which tensors of the training state while it is saved.

Each whole tensor has one owner, and what the owners have is balanced by bytes. So no rank needs
memory for the state of all, and all of them write at the same time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

SMALLEST_SHARE = 2**20  # bytes; adapters on many ranks would otherwise make files of a few KB


@dataclass(frozen=True)
class Entry:
    """A tensor of the training state, of which this rank may have all, a part, or nothing.

    Attributes:
        name: in a checkpoint.
        nbytes: of the whole tensor.
        gather: takes the rank that is to have the whole tensor and returns it there; on other ranks
            the result means nothing. Every rank that has the entry takes part.
    """

    name: str
    nbytes: int
    gather: Callable[[int], torch.Tensor]


def share_out(
    sizes: Mapping[str, int],
    num_ranks: int,
    holders: Mapping[str, Sequence[int]] | None = None,
    smallest_share: int = SMALLEST_SHARE,
) -> dict[str, int]:
    """Return the owner of each tensor: the largest go first, each to the rank with the least.

    No rank gets more than an equal share and the largest tensor. Less than `smallest_share` each
    is not spread over all ranks.

    Args:
        sizes: bytes by name; all ranks must give the same.
        holders: the ranks among which to choose the owner of each tensor; by default all.
        smallest_share: bytes.
    """
    owners = {}
    every_rank = spread_ranks(sum(sizes.values()) // smallest_share, num_ranks)
    loads = [0] * num_ranks
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        candidates = every_rank
        if holders is not None:
            spread = [rank for rank in holders[name] if rank in every_rank]
            candidates = spread or holders[name]
        owner = min(candidates, key=loads.__getitem__)
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners


def largest_first(entries: Iterable[Entry]) -> list[Entry]:
    """Return entries in the order in which to gather them, the same on every rank that has them.

    Gathering takes memory besides the tensor itself. The largest ones take it while a rank still
    has little of its share.
    """
    return sorted(entries, key=lambda entry: (-entry.nbytes, entry.name))


def spread_ranks(number: int, num_ranks: int) -> list[int]:
    """Return this many ranks, at least one and at most all, at equal distances from each other."""
    number = min(max(number, 1), num_ranks)
    return [place * num_ranks // number for place in range(number)]
