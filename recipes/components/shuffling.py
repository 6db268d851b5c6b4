# SPDX-License-Identifier: Apache-2.0
"""The order of an epoch as a function of seed, epoch and place: no long list of it is ever made.

A list of 100 million rows would take 0.8 GB on every rank, and time in every epoch. Up to a million
rows it takes 8 MB, and small data sets keep the order in which their figures were measured.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from components.int_column import Lengths, stable_argsort

LISTED = 1  # the order of the first version, whose checkpoints do not name it
NEWEST = 2  # the order of new runs
LONGEST_LIST = 2**20  # numbers; the newest order is a list too up to here
# Four rounds make a random permutation if the round functions are random (Luby and Rackoff 1988)
# and the halves are large; halves of two bits need eight (test_shuffling.py measures it)
ROUNDS = 8
FEWEST_BITS = 4
AT_ONCE = 4096  # places whose rows are computed at a time


class Order(Protocol):
    """An order of the numbers from 0 to a number of rows."""

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers that stand at these places of the order, [n]."""
        ...


class FileOrder:
    """The order of the rows in their file."""

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the places themselves."""
        return places


class ListedOrder:
    """An order that is a list, for runs that began with it."""

    def __init__(self, number: int, key: Sequence[int]) -> None:
        self._list = np.random.default_rng(key).permutation(number)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers that stand at these places of the order, [n]."""
        return self._list[places]


class SortedInParts:
    """An order of which each part of `size` numbers begins with the longest row."""

    def __init__(self, order: Order, lengths: Lengths, size: int) -> None:
        """lengths: tokens of each row; size: of a part."""
        self._order = order
        self._lengths = lengths
        self._size = size
        self._part = -1  # the number of the part that was sorted last
        self._sorted = np.empty(0, dtype=np.int64)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers that stand at these places of the order, [n]."""
        parts = places // self._size
        found = np.empty(len(places), dtype=np.int64)
        for part in np.unique(parts).tolist():
            inside = parts == part
            found[inside] = self._sort_part(part)[places[inside] - part * self._size]
        return found

    def _sort_part(self, part: int) -> np.ndarray:
        """Return the numbers of a part, those of the longest rows first."""
        if part != self._part:
            end = min((part + 1) * self._size, len(self._lengths))
            numbers = self._order.at(np.arange(part * self._size, end))
            lengths = self._lengths[numbers]
            longest_first = stable_argsort(lengths.max() - lengths)
            self._sorted = numbers[longest_first]
            self._part = part
        return self._sorted


class ShuffledOrder:
    """A random order, computed where it is asked for.

    A Feistel network permutes all numbers of as many bits as are needed. A result that is too
    large is permuted again until it is one of the numbers wanted ("cycle walking": Black
    and Rogaway, Ciphers with Arbitrary Finite Domains, 2002). Mitchell et al., Bandwidth-Optimal
    Random Shuffling for GPUs (arXiv 2106.06161), show such orders to be as good for shuffling as a
    list. The round function is the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
    """

    def __init__(self, number: int, key: Sequence[int]) -> None:
        """Make an order of `number` numbers that follows from a key such as (seed, epoch)."""
        self._number = number
        bits = max(FEWEST_BITS, (number - 1).bit_length())
        self._halves = (bits // 2, bits - bits // 2)
        self._round_keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers that stand at these places of the order, [n]."""
        found = self._permute(places.astype(np.uint64))
        outside = np.flatnonzero(found >= self._number)
        while len(outside):
            found[outside] = self._permute(found[outside])
            outside = outside[found[outside] >= self._number]
        return found.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        """Return a permutation of the numbers of all bits: uint64, [n]."""
        left_bits, right_bits = self._halves
        for key in self._round_keys:
            left = values >> np.uint64(right_bits)
            right = values & low_bits(right_bits)
            changed = (left ^ mix(right + key)) & low_bits(left_bits)
            values = right << np.uint64(left_bits) | changed
            left_bits, right_bits = right_bits, left_bits
        return values


def low_bits(number: int) -> np.uint64:
    """Return a mask of this many bits."""
    return np.uint64((1 << number) - 1)


def mix(values: np.ndarray) -> np.ndarray:
    """Return numbers whose bits each depend on all bits of the given ones: uint64, [n]."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def shuffled(number: int, key: Sequence[int], version: int = NEWEST) -> Order:
    """Return the order of `number` numbers that follows from a key such as (seed, epoch).

    Args:
        version: LISTED or NEWEST; a resumed run keeps the one that it began with.
    """
    if version == LISTED or number <= LONGEST_LIST:
        return ListedOrder(number, key)
    return ShuffledOrder(number, key)


def numbers_from(order: Order, start: int, end: int) -> Iterator[int]:
    """Yield the numbers that stand at the places from `start` to `end` - 1 of an order."""
    for first in range(start, end, AT_ONCE):
        yield from order.at(np.arange(first, min(first + AT_ONCE, end))).tolist()
