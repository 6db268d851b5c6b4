# SPDX-License-Identifier: Apache-2.0
"""Lines of rows: one row each, or as many rows as fit, packed in time linear in their number."""

from collections.abc import Iterator, Sequence

import numpy as np
from accelerate import Accelerator

from components.host_sharing import NewArray, compute_once_a_host
from components.int_column import Lengths

Line = list[int]  # numbers of the rows in one line of a batch
ROWS_AT_ONCE = 1 << 20  # rows whose lengths are read at a time
ROWS_IN_GROUP = 1 << 23  # rows that are sorted by length before they are placed


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


def pack_rows(accelerator: Accelerator, lengths: Lengths, capacity: int) -> PackedLines:
    """Return lines of at most `capacity` tokens, in the order of their first rows in the file.

    One rank of each host computes them (`best_fit`). Every rank takes part.
    """

    def compute(new_array: NewArray) -> Sequence[np.ndarray]:
        lines = best_fit(lengths, capacity, new_array).in_order_of_rows()
        return lines.rows, lines.starts, lines.ends

    return PackedLines(*compute_once_a_host(accelerator, compute))


def best_fit(
    lengths: Sequence[int] | Lengths, capacity: int, new_array: NewArray = np.empty
) -> PackedLines:
    """Return lines of at most `capacity` tokens by best-fit decreasing (arXiv 2404.10830).

    Rows are placed from the longest to the shortest, each in the line that it fills best, the
    earliest of several. They are in their line in that order, and lines in the order in which
    they were begun.

    The time is linear in the number of rows, since lengths are whole numbers up to `capacity`: rows
    of one length are placed at once, into all lines with the same room (`Rooms`). It is done
    twice, first to find how many rows each line gets, so that little more memory is needed than
    for the result, 4 bytes per row.

    Args:
        lengths: tokens of each row, from 1 to `capacity`. They are read in parts.
        new_array: a function that makes the array of all rows.
    """
    row_type = np.int32 if len(lengths) < 2**31 else np.int64
    numbers = np.zeros(capacity + 1, dtype=np.int64)
    for _, part in in_parts(lengths):
        numbers += np.bincount(part, minlength=capacity + 1)
    found = np.flatnonzero(numbers)[::-1].tolist()  # the lengths that there are

    rooms = Rooms(capacity)
    sizes = np.zeros(0, dtype=np.int32)
    for length in found:
        for lines, rows_per_line in rooms.take_rows(length, int(numbers[length])):
            if rooms.num_lines > len(sizes):
                sizes = np.pad(sizes, (0, 2 * rooms.num_lines - len(sizes)))
            sizes[lines] += rows_per_line
    starts = np.cumsum(sizes[: rooms.num_lines], dtype=row_type) - sizes[: rooms.num_lines]
    del sizes

    rooms = Rooms(capacity)
    rows = new_array(len(lengths), row_type)
    ends = starts.copy()  # These grow with the rows that are placed.
    for group in groups_of_lengths(found, numbers):
        longest_first = sort_rows(lengths, group, numbers, row_type)
        for length in group:
            for lines, rows_per_line in rooms.take_rows(length, int(numbers[length])):
                places = ends[lines][:, None] + np.arange(rows_per_line, dtype=row_type)
                rows[places.ravel()] = longest_first[: places.size]
                longest_first = longest_first[places.size :]
                ends[lines] += rows_per_line
    return PackedLines(rows, starts, ends)


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

    def take_rows(self, length: int, number: int) -> Iterator[tuple[np.ndarray, int]]:
        """Place rows of a length, and yield lines and the number of rows that each of them gets."""
        while number:
            room, lines = self._best_lines(length, number)
            rows_per_line = room // length
            num_placed = min(number, len(lines) * rows_per_line)
            number -= num_placed
            num_full, rest = divmod(num_placed, rows_per_line)
            full = lines[:num_full]
            if num_full:
                self._put(room - rows_per_line * length, full)
                yield full, rows_per_line
            if rest:
                last = lines[num_full : num_full + 1]
                self._put(room - rest * length, last)
                yield last, rest
                num_full += 1
            self._put(room, lines[num_full:])

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


def in_parts(lengths: Sequence[int] | Lengths) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the number of the first row and the lengths, [rows], of one part after the other."""
    for start in range(0, len(lengths), ROWS_AT_ONCE):
        yield start, np.asarray(lengths[start : start + ROWS_AT_ONCE])


def groups_of_lengths(found: Sequence[int], numbers: np.ndarray) -> Iterator[list[int]]:
    """Yield lengths in groups of at most ROWS_IN_GROUP rows, or of one length.

    Args:
        found: the lengths that there are.
        numbers: the number of rows of each length.
    """
    group: list[int] = []
    num_rows = 0
    for length in found:
        if group and num_rows + numbers[length] > ROWS_IN_GROUP:
            yield group
            group = []
            num_rows = 0
        group.append(length)
        num_rows += numbers[length]
    if group:
        yield group


def sort_rows(
    lengths: Sequence[int] | Lengths, group: Sequence[int], numbers: np.ndarray, row_type: type
) -> np.ndarray:
    """Return the numbers of the rows of some lengths, those of the longest first.

    Rows of one length stay in their order. This is a counting sort, in parts.

    Args:
        group: the lengths, which are all that there are from the longest to the shortest of them.
        numbers: the number of rows of each length.
    """
    longest, shortest = group[0], group[-1]
    sizes = numbers[longest : shortest - 1 if shortest else None : -1]
    next_place = np.cumsum(sizes) - sizes  # by how much a row is shorter than the longest
    sorted_rows = np.empty(sizes.sum(), dtype=row_type)
    for start, part in in_parts(lengths):
        inside = np.flatnonzero((part >= shortest) & (part <= longest))
        # numpy sorts 16 bits in linear time
        shorter_by = (longest - part[inside].astype(np.int64)).astype(np.min_scalar_type(longest))
        order = np.argsort(shorter_by, kind="stable")
        keys, firsts, counts = np.unique(shorter_by[order], return_index=True, return_counts=True)
        places = np.arange(len(inside)) + np.repeat(next_place[keys] - firsts, counts)
        sorted_rows[places] = start + inside[order]
        next_place[keys] += counts
    return sorted_rows
