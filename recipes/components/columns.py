"""The columns of one row: which are needed, which are read, and which nothing reads."""

from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # {name of a column: its value}


class TrackedRow(UserDict[str, Any]):
    """A row that remembers which of its columns were read, so that the others can be reported."""


def is_empty(value: object) -> bool:
    """Return whether a value is as good as absent: readers fill what a row lacks with null."""
    raise NotImplementedError


def validate_texts(row: Row, text_columns: Sequence[str], label_column: str) -> None:
    """Check that a row has these columns, and text in those of text.

    Raises:
        ValueError: what is wrong with the row, and which flags name the columns.
    """
    raise NotImplementedError


def shorten(value: object) -> str:
    """Return the beginning of a value as text, for a message."""
    raise NotImplementedError


def list_columns(row: Iterable[str]) -> str:
    """Return the names of a row's columns as text, for a message."""
    raise NotImplementedError
