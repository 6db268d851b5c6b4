# SPDX-License-Identifier: Apache-2.0
"""Lines have every row once, are nearly full, and are those of best-fit decreasing row by row."""

from bisect import bisect_left, insort
from collections import Counter

import numpy as np
import pytest

from components import lines as lines_module
from components.lines import best_fit

CAPACITY = 512


def lengths_of(kind, number=3000):
    chance = np.random.default_rng(0)
    return {
        "ragged": chance.integers(1, CAPACITY + 1, number),
        "short": chance.integers(1, 60, number),
        "long": chance.integers(400, CAPACITY + 1, number),
        "equal": np.full(number, 171),
        "one": np.array([7]),
    }[kind]


def place_row_by_row(lengths, capacity):
    """Best-fit decreasing as its paper describes it: one row after the other, into sorted rooms."""
    lines = []
    rooms = []  # (tokens left, number of the line)
    for row in np.argsort(-np.asarray(lengths), kind="stable").tolist():
        place = bisect_left(rooms, (lengths[row], 0))
        if place < len(rooms):
            room, line = rooms.pop(place)
        else:
            room, line = capacity, len(lines)
            lines.append([])
        lines[line].append(row)
        insort(rooms, (room - lengths[row], line))
    return lines


@pytest.mark.parametrize("kind", ["ragged", "short", "long", "equal", "one"])
def test_each_row_is_packed_once_and_next_to_nothing_stays_empty(kind):
    lengths = lengths_of(kind)
    lines = best_fit(lengths, CAPACITY)
    assert Counter(row for line in lines for row in line) == Counter(range(len(lengths)))
    sums = np.array([lengths[line].sum() for line in lines])
    assert sums.max() <= CAPACITY
    at_least = {"long": len(lengths), "equal": np.ceil(len(lengths) / 2)}
    least = at_least.get(kind, np.ceil(lengths.sum() / CAPACITY))
    assert len(lines) <= 11 / 9 * least + 1  # what best-fit decreasing guarantees (Johnson 1974)
    if kind in ("ragged", "short"):
        assert lengths.sum() / (CAPACITY * len(lines)) > 0.97


def test_buckets_of_rooms_give_the_lines_of_placing_row_by_row(monkeypatch):
    """In all sorts of lengths and capacities, with rows that are read and sorted in parts."""
    monkeypatch.setattr(lines_module, "ROWS_AT_ONCE", 50)
    monkeypatch.setattr(lines_module, "ROWS_IN_GROUP", 70)
    chance = np.random.default_rng(0)
    for _ in range(100):
        capacity = int(chance.integers(1, 200))
        shortest = int(chance.integers(1, capacity + 1))
        lengths = chance.integers(shortest, capacity + 1, chance.integers(1, 400))
        expected = place_row_by_row(lengths, capacity)
        packed = best_fit(lengths, capacity)
        assert list(packed) == expected
        assert list(packed.in_order_of_rows()) == sorted(expected, key=min)


def test_lengths_may_be_of_a_type_that_does_not_hold_the_capacity():
    lengths = np.array([3, 200, 7], dtype=np.uint8)
    assert list(best_fit(lengths, 100_000)) == [[1, 2, 0]]
