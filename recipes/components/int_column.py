# SPDX-License-Identifier: Apache-2.0
"""A column of whole numbers that is read from disk as it is used.

All ranks of a host map the same file of prepared rows. An array of 100 million lengths would take
0.8 GB on each of them.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np


class IntColumn:
    """The values of a column without missing ones, as an array can be asked for them."""

    def __init__(self, column: Any) -> None:
        """column: a ChunkedArray of pyarrow."""
        self._column = column
        sizes = [len(chunk) for chunk in column.chunks]
        self._ends = np.cumsum(sizes, dtype=np.int64)

    @classmethod
    def of(cls, dataset: Any, name: str) -> "IntColumn":
        """Return a column of a data set of the library datasets."""
        return cls(column_of(dataset, name))

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Return the values of some rows, given as a slice or as their numbers, [rows]: int64."""
        if isinstance(rows, slice):
            start, end, _ = rows.indices(len(self))
            return self._column.slice(start, end - start).to_numpy().astype(np.int64)
        values = np.empty(len(rows), dtype=np.int64)
        chunks = np.searchsorted(self._ends, rows, side="right")
        # Sorted once: a comparison of all rows with each of thousands of chunks takes seconds
        by_chunk = stable_argsort(chunks)
        numbers, starts = np.unique(chunks[by_chunk], return_index=True)
        parts = np.split(by_chunk, starts[1:])
        # Without rows there is one part, which is empty, and no number
        for number, part in zip(numbers.tolist(), parts, strict=False):
            chunk = self._column.chunk(number)
            values[part] = chunk.to_numpy()[rows[part] - self._ends[number] + len(chunk)]
        return values

    def arrays(self) -> Iterator[np.ndarray]:
        """Yield the values of all rows, chunk after chunk; chunks without rows are left out."""
        for chunk in self._column.chunks:
            if len(chunk) > 0:
                yield chunk.to_numpy(zero_copy_only=False)  # Truth values are bits on disk

    def sum(self) -> int:
        """Return the sum of all values; a truth value counts as 1."""
        return sum(int(array.sum()) for array in self.arrays())

    def max(self) -> int:
        """Return the largest value."""
        return max(int(array.max()) for array in self.arrays())

    def mean(self) -> float:
        """Return the mean of all values."""
        return self.sum() / len(self)


Lengths = np.ndarray | IntColumn  # tokens of each row


def stable_argsort(values: np.ndarray) -> np.ndarray:
    """Return the places of whole numbers from 0 on in ascending order, equal ones as they stand.

    numpy sorts numbers of up to 16 bits by counting, in a fifth of the time.
    """
    largest = int(values.max(initial=0))
    return np.argsort(values.astype(np.min_scalar_type(largest)), kind="stable")


def column_of(dataset: Any, name: str) -> Any:
    """Return a column of a data set as a ChunkedArray of pyarrow.

    It is the one on disk, unless rows were selected.
    """
    column = dataset.data.column(name)
    if dataset._indices is None:
        return column
    return column.take(dataset._indices.column(0))
