"""The columns of a row: which are needed, which are read, and which are left unread."""

from collections import UserDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # {name of a column: its value}
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


def validate_texts(row: Row, text_columns: Sequence[str], label_column: str) -> None:
    """Check that a row has these columns, and that the text columns hold text.

    Raises:
        ValueError: what is wrong with the row, and which flags set the columns.
    """
    needed = [*text_columns, label_column]
    if not set(needed) <= set(row):
        raise ValueError(
            f"has the columns {list_columns(row)}; needs {', '.join(needed)}: "
            "see --text_columns and --label_column"
        )
    texts = [row[name] for name in text_columns]
    are_texts = all(isinstance(text, str) for text in texts)
    if not are_texts or not "".join(texts).strip():
        values = ", ".join("null" if text is None else repr(text) for text in texts)
        raise ValueError(f"has no text in {' and '.join(text_columns)}: {values[:MAX_SHOWN]}")


def is_empty(value: object) -> bool:
    """Return whether a value counts as missing; readers fill what a row lacks with null."""
    if isinstance(value, str):
        value = value.strip()
    return value in EMPTY_VALUES


def shorten(value: object) -> str:
    """Return the beginning of a value as text, for a message."""
    if value is None:
        return "null"
    if isinstance(value, list):
        unit = "part" if len(value) == 1 else "parts"
        return f"a list of {len(value)} {unit}"
    return str(value)[:MAX_SHOWN]


def list_columns(names: Iterable[str]) -> str:
    """Return names of columns as text, for a message."""
    return ", ".join(names)[:MAX_SHOWN] or "none"


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
