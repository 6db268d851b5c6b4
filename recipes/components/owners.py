# SPDX-License-Identifier: Apache-2.0
"""Which rank keeps which tensors of the training state while it is saved.

Each whole tensor has one owner, and what the owners have is balanced by bytes. So no rank needs
memory for the state of all, and all of them write at the same time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

# About the bytes that an owner has at least. Adapters on many ranks, or step counts on more ranks
# than there are matrices, would otherwise make files of a few bytes.
SMALLEST_SHARE = 2**20


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

    Where there is enough for all ranks to be owners, none gets more than an equal share and the
    largest tensor. Less is dealt to fewer ranks.

    Args:
        sizes: bytes by name; all ranks must give the same.
        holders: the ranks among which to choose the owner of each tensor; by default all.
        smallest_share: about the bytes that an owner has at least (`number_of_owners`).
    """
    by_size = sorted(sizes, key=lambda name: (-sizes[name], name))
    every_rank = tuple(range(num_ranks))
    held: dict[tuple[int, ...], list[str]] = {}  # {ranks: the tensors that one of them is to own}
    for name in by_size:
        ranks = every_rank if holders is None else tuple(holders[name])
        held.setdefault(ranks, []).append(name)
    candidates: dict[str, list[int]] = {}
    for ranks, names in held.items():
        number = number_of_owners([sizes[name] for name in names], smallest_share)
        chosen = [ranks[place] for place in spread_ranks(number, len(ranks))]
        candidates |= dict.fromkeys(names, chosen)

    owners = {}
    loads = [0] * num_ranks
    for name in by_size:
        owner = min(candidates[name], key=loads.__getitem__)
        owners[name] = owner
        loads[owner] += sizes[name]
    return owners


def number_of_owners(sizes: Iterable[int], smallest_share: int) -> int:
    """Return how many times tensors fill a smallest share, one after another.

    With this number of owners, each can have a smallest share. If the largest tensors go first,
    each to the owner with the least, every owner has at least three quarters of what it can have
    (Deuermeyer, Friesen and Langston 1982).

    Args:
        sizes: bytes, the largest first.
    """
    number = 0
    filled = 0
    for size in sizes:
        filled += size
        if filled >= smallest_share:
            number += 1
            filled = 0
    return number


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
