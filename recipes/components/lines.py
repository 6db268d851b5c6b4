# SPDX-License-Identifier: Apache-2.0
"""Lines of rows: one row each, or as many rows as fit, packed in time linear in their number."""

from collections.abc import Iterator, Sequence

import numpy as np

Line = list[int]  # numbers of the rows in one line of a batch
SORTED_AT_ONCE = 1 << 20  # keys that are sorted at a time, which bounds the memory


class OnePerLine(Sequence[Line]):
    """Lines of one row each, which are made when they are read."""

    def __init__(self, rows: Sequence[int]) -> None:
        """rows: the number of the row of each line."""
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    # pyrefly: ignore[bad-override]  # no slices: loaders read one line at a time
    def __getitem__(self, number: int) -> Line:
        return [self._rows[number]]


class PackedLines(Sequence[Line]):
    """Lines of several rows, in arrays: a list of lists would take ten times the memory.

    Attributes:
        rows: the numbers of all rows, line after line, [rows].
        starts: where each line begins in `rows`, [lines].
        ends: where each line ends in `rows`, [lines].
    """

    def __init__(self, rows: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        self.rows = rows
        self.starts = starts
        self.ends = ends

    def __len__(self) -> int:
        return len(self.starts)

    # pyrefly: ignore[bad-override]  # no slices: loaders read one line at a time
    def __getitem__(self, number: int) -> Line:
        return self.rows[self.starts[number] : self.ends[number]].tolist()

    def in_order_of_rows(self) -> "PackedLines":
        """Return the same lines in the order of the first of their rows in the file."""
        if not len(self):
            return self
        first_rows = np.minimum.reduceat(self.rows, self.starts)
        order = np.argsort(first_rows)
        return PackedLines(self.rows, self.starts[order], self.ends[order])


def best_fit(lengths: Sequence[int] | np.ndarray, capacity: int) -> PackedLines:
    """Return lines of at most `capacity` tokens by best-fit decreasing (arXiv 2404.10830).

    Rows are placed from the longest to the shortest, each in the line that it fills best, the
    earliest of several. They are in their line in that order, and lines in the order in which
    they were begun.

    The time is linear in the number of rows, since lengths are whole numbers up to `capacity`: rows
    of one length are placed at once, into all lines with the same room (`Rooms`).

    Args:
        lengths: tokens of each row, none above `capacity`.
    """
    lengths = np.asarray(lengths)
    order, numbers = sort_by_key(lengths, capacity + 1, largest_first=True)
    line_of_place = np.empty_like(order)
    rooms = Rooms(capacity)
    place = 0
    for length in reversed(np.flatnonzero(numbers).tolist()):
        for lines in rooms.take_rows(length, int(numbers[length])):
            line_of_place[place : place + len(lines)] = lines
            place += len(lines)
    places, sizes = sort_by_key(line_of_place, rooms.num_lines)
    ends = np.cumsum(sizes, dtype=sizes.dtype)
    return PackedLines(order[places], ends - sizes, ends)


class Rooms:
    """The lines so far, in a bucket for each number of tokens that a line has left.

    A bucket is a list of arrays of line numbers, which are joined and sorted when it is used. That
    happens about once to each: while rows of a length L are placed, lines are only taken from the
    smallest room of L and more, and all but the last of them are filled up to less than L. So a
    bucket that is in use grows by single lines only.

    Attributes:
        num_lines: the number of lines so far.
    """

    def __init__(self, capacity: int) -> None:
        self.num_lines = 0
        self._capacity = capacity
        self._buckets: dict[int, list[np.ndarray]] = {}
        self._used = 0  # A number whose bit r is set if a line has room for r tokens

    def take_rows(self, length: int, number: int) -> Iterator[np.ndarray]:
        """Place rows of a length, and yield the lines of the first ones, of the next ones, ..."""
        while number:
            room, lines = self._best_lines(length, number)
            rows_per_line = room // length
            num_placed = min(number, len(lines) * rows_per_line)
            num_full, rest = divmod(num_placed, rows_per_line)
            self._put(room - rows_per_line * length, lines[:num_full])
            self._put(room, lines[num_full:] if not rest else lines[num_full + 1 :])
            if rest:
                self._put(room - rest * length, lines[num_full : num_full + 1])
            yield np.repeat(lines[: num_full + 1], rows_per_line)[:num_placed]
            number -= num_placed

    def _best_lines(self, length: int, number: int) -> tuple[int, np.ndarray]:
        """Take the lines that rows of a length fill best; new ones, if it fits into none.

        Returns:
            The room of the lines, and their numbers from the smallest to the largest.
        """
        fitting = self._used >> length
        if not fitting:
            first = self.num_lines
            self.num_lines += -(-number // (self._capacity // length))
            return self._capacity, np.arange(first, self.num_lines, dtype=np.int32)
        room = length + (fitting & -fitting).bit_length() - 1
        self._used ^= 1 << room
        return room, np.sort(np.concatenate(self._buckets.pop(room)))

    def _put(self, room: int, lines: np.ndarray) -> None:
        """Add lines to the bucket of a room."""
        if not room or not len(lines):
            return
        self._buckets.setdefault(room, []).append(lines)
        self._used |= 1 << room


def sort_by_key(
    keys: np.ndarray, num_keys: int, *, largest_first: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the places of keys in the order of the keys, and how often there is each key.

    Equal keys stay in their order. This is a counting sort, of a part of the keys at a time, so
    that it takes little more memory than its result.

    Args:
        keys: whole numbers from 0 to num_keys - 1.
        largest_first: whether the keys are in falling order.

    Returns:
        Places, [keys], and numbers by key, [num_keys].
    """
    key_type = np.min_scalar_type(num_keys)  # numpy sorts 16 bits in linear time
    place_type = np.int32 if len(keys) < 2**31 else np.int64
    starts = range(0, len(keys), SORTED_AT_ONCE)
    numbers = np.zeros(num_keys, dtype=place_type)
    for start in starts:
        np.add.at(numbers, keys[start : start + SORTED_AT_ONCE], 1)
    next_place = np.cumsum(numbers, dtype=place_type)
    if largest_first:
        next_place = len(keys) - next_place
    else:
        next_place -= numbers
    order = np.empty(len(keys), dtype=place_type)
    for start in starts:
        part = keys[start : start + SORTED_AT_ONCE].astype(key_type)
        if largest_first:
            part = key_type.type(num_keys - 1) - part
        part_order = np.argsort(part, kind="stable")
        found, firsts, counts = np.unique(part[part_order], return_index=True, return_counts=True)
        if largest_first:
            found = num_keys - 1 - found.astype(place_type)
        places = np.arange(len(part)) + np.repeat(next_place[found] - firsts, counts)
        order[places] = start + part_order
        next_place[found] += counts.astype(place_type)
    return order, numbers
