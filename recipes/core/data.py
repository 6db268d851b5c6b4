# SPDX-License-Identifier: Apache-2.0
"""Rows of data sets: their columns, which of them are read, and what identifies a row."""

from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import xxhash

Row = Mapping[str, Any]  # {name of a column: its value}
IGNORED = -100  # the label of a token that is not trained on; torch's cross_entropy leaves it out
MAX_NAMED = 20  # columns that a message names; rows may have thousands
MAX_SHOWN = 80  # characters of a value or of a list of columns, in a message
# A column of tools is often JSON as text, so empty JSON counts too
EMPTY_VALUES = (None, "", [], {}, "null", "[]", "{}")


class TrackedRow(UserDict[str, Any]):
    """A row that remembers which of its columns were read, so that the others can be reported.

    Attributes:
        data: the row itself and not a copy, since a row of a data set decodes columns lazily.
        columns_read: names of the columns that were read.
        dropped_keys: keys of its messages that the chat template drops, as far as found.
    """

    def __init__(self, row: Row) -> None:
        super().__init__()
        self.data = row  # pyrefly: ignore[bad-assignment]  # any mapping will do
        self.columns_read: set[str] = set()
        self.dropped_keys: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.columns_read.add(key)
        return self.data[key]

    def unread(self) -> list[str]:
        """Return the first MAX_NAMED columns and message keys that nothing read."""
        keys = [f"{key} (of messages)" for key in sorted(self.dropped_keys)]
        columns = [name for name in self.data if name not in self.columns_read]
        return [*keys, *columns][:MAX_NAMED]


class RenamedRow(Mapping[str, Any]):
    """A row under other names of its columns; reading one reads the column of the row itself."""

    def __init__(self, row: Row, names: Mapping[str, str]) -> None:
        """Wrap a row.

        Args:
            names: {new name: name of the column}. All other columns keep their names.
        """
        renamed = set(names.values())
        self._row = row
        self._names = {name: name for name in row if name not in renamed} | dict(names)

    def __getitem__(self, key: str) -> Any:
        return self._row[self._names[key]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names  # Mapping's own way would read the column


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with its columns under the names of their roles.

    Args:
        columns: {role: name of a column}, as --columns gives them.

    Raises:
        ValueError: if the row lacks one of these columns.
    """
    for role, column in columns.items():
        if column not in row:
            raise ValueError(
                f"has no column {column}, which --columns names as {role}: "
                f"it has {list_columns(row)}"
            )
    return RenamedRow(row, columns) if columns else row


def is_empty(value: object) -> bool:
    """Return whether a value counts as missing; readers fill what a row lacks with null."""
    if isinstance(value, str):
        value = value.strip()
    return value in EMPTY_VALUES


def shorten(value: object) -> str:
    """Return the beginning of a value as text, for a message."""
    return "null" if value is None else str(value)[:MAX_SHOWN]


def list_columns(names: Iterable[str]) -> str:
    """Return names of columns as text, for a message."""
    return ", ".join(names)[:MAX_SHOWN] or "none"


def missing_columns(names: Iterable[str], needed: str, *roles: str) -> str:
    """Return what is wrong with a row that lacks columns, and what to do.

    Args:
        names: the columns that it has.
        needed: those that were looked for.
        roles: their roles for --columns.
    """
    flags = " ".join(f"{role}=COLUMN" for role in roles)
    return f"has the columns {list_columns(names)}; needs {needed}: name yours by --columns {flags}"


def note_unread(num_rows_with: Mapping[str, int], num_rows: int) -> str:
    """Return what the start summary says about columns that nothing reads; "" if there are none.

    Args:
        num_rows_with: {name of a column: number of rows that have it}.
        num_rows: number of all rows.
    """
    if not num_rows_with:
        return ""
    names = []
    for name, count in num_rows_with.items():
        is_in_all = count == num_rows
        names.append(name if is_in_all else f"{name} in {count} rows")
    more = ""
    if len(names) > MAX_NAMED:
        more = f" and {len(names) - MAX_NAMED} more"
    return f"; not read: {', '.join(names[:MAX_NAMED])}{more}"


def hash_of_row(content: bytes) -> int:
    """Return a hash of 63 bits (xxh3), since datasets stores signed 64-bit integers."""
    return xxhash.xxh3_64_intdigest(content) >> 1
