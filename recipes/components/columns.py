# SPDX-License-Identifier: Apache-2.0
"""The columns of a row: which are needed, which are read, and which are left unread."""

import difflib
import re
import shlex
from collections import UserDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]  # {name of a column: its value}
MAX_NAMED = 20  # columns that a message names; rows may have thousands
MAX_SHOWN = 80  # characters of a value or of a list of columns, in a message
# A column of tools is often JSON as text, so empty JSON counts too
EMPTY_VALUES = (None, "", [], {}, "null", "[]", "{}")
# For advice: what columns of each role are often called, or contain in their names; likely first.
# A name of one letter is a column's whole name.
USUAL_NAMES = {
    "prompt": (
        "prompt",
        "question",
        "query",
        "instruction",
        "request",
        "problem",
        "input",
        "user",
        "q",
    ),
    "completion": (
        "completion",
        "answer",
        "response",
        "reply",
        "output",
        "solution",
        "assistant",
        "a",
    ),
    "chosen": ("chosen", "preferred", "accepted", "better", "good", "win"),
    "rejected": ("rejected", "worse", "bad", "lose"),
    "text": ("text", "content", "body", "document", "sentence", "review", "article"),
    "text_pair": ("text", "sentence", "hypothesis"),
    "label": (
        "label",
        "class",
        "category",
        "kind",
        "topic",
        "target",
        "score",
        "rating",
        "stars",
        "sentiment",
        "intent",
    ),
    "source": ("source", "document", "article", "text", "input", "body"),
    "target": ("target", "summary", "output", "answer", "translation", "title"),
    "tokens": ("token", "word"),
    "tags": ("tag", "label", "ner", "entities"),
    "image": ("image", "img", "picture", "photo"),
}
LISTS = ("tokens", "tags")  # roles whose columns hold lists
# For advice: the columns by which rows of each recipe are recognized; the first that fits counts
RECIPES_BY_COLUMNS = (
    ("chosen rejected", "recipes/llama_dpo.py"),
    ("messages", "recipes/llama.py"),
    ("conversations", "recipes/llama.py"),
    ("prompt completion", "recipes/llama.py"),
    ("instruction output", "recipes/llama.py"),
    ("question answer", "recipes/llama.py"),
    ("tokens ner_tags", "recipes/bert_ner.py"),
    ("text label", "recipes/bert.py"),
    ("document summary", "recipes/t5.py"),
    ("image label", "recipes/vit.py"),
    ("text", "recipes/mistral_pretrain.py"),
)
# What a CSV file may have in place of commas, which makes one column of all its columns
OTHER_SEPARATORS = ((";", "semicolons"), ("\t", "tabs"))


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
        return key in self._names  # Mapping's own way would read the column.


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with its columns under the names of their roles, as --columns gives them.

    Args:
        columns: {role: name of a column}.

    Raises:
        ValueError: if the row lacks one of these columns.
    """
    if not columns:
        return row
    for role, column in columns.items():
        if column not in row:
            meaning = ""
            for close in difflib.get_close_matches(column, row, 1):
                meaning = f"did you mean {close}? "
            raise ValueError(
                f"has no column {column}, which --columns names as {role}: {meaning}"
                f"it has {list_columns(row)}"
            )
    return RenamedRow(row, columns)


def validate_texts(row: Row, text_columns: Sequence[str], label_column: str) -> None:
    """Check that a row has these columns, and that the text columns hold text.

    Raises:
        ValueError: what is wrong with the row, and what names the columns.
    """
    needed = [*text_columns, label_column]
    if not set(needed) <= set(row):
        wanted = dict(zip(("text", "text_pair"), text_columns, strict=False))
        fix = advise_columns(row, {**wanted, "label": label_column}, "TEXT_COLUMNS")
        raise ValueError(f"has the columns {list_columns(row)}; needs {', '.join(needed)}: {fix}")
    texts = [row[name] for name in text_columns]
    are_texts = all(isinstance(text, str) for text in texts)
    if not are_texts or not "".join(texts).strip():
        values = ", ".join("null" if text is None else repr(text) for text in texts)
        raise ValueError(f"has no text in {' and '.join(text_columns)}: {values[:MAX_SHOWN]}")


def are_texts(values: Sequence[object]) -> bool:
    """Return whether the values of a column are texts, and not ids, numbers, dates or classes."""
    texts = [value for value in values if isinstance(value, str) and re.search("[^\\W\\d_]", value)]
    distinct = len(set(texts))
    in_words = sum(" " in text or not text.isascii() for text in texts)
    # Single words that occur again and again may be what a question is about
    are_words = 2 * in_words > len(values) or 2 * distinct <= len(values)
    return 2 * len(texts) > len(values) and distinct >= min(len(values), 5) and are_words


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


# ---- Advice ----
def advise_columns(row: Row, wanted: Mapping[str, str], place: str = "") -> str:
    """Return what to do if a row lacks columns: the --columns that fit it best.

    Where no names are similar, COLUMN stands for them, and the recipe for such rows is named.

    Args:
        wanted: {role: name of the column that was looked for}.
        place: the name in the recipe that can be edited instead.
    """
    for separator, plural in OTHER_SEPARATORS:
        if len(row) == 1 and separator in next(iter(row)):
            return f"its columns seem to be separated by {plural}: save the file with commas"
    found = guess_columns(row, wanted)
    fixes = []
    recipe = None if found else find_recipe(row, wanted)
    if recipe is not None:
        fixes.append(f"use {recipe}, which is for such rows")
    if not found:
        found = {role: "COLUMN" for role, name in wanted.items() if name not in row}
    pairs = [shlex.quote(f"{role}={column}") for role, column in found.items()]
    fixes.append(f"pass --columns {' '.join(pairs)}")
    if place:
        fixes.append(f"edit {place}")
    return ", or ".join(fixes)


def find_recipe(row: Row, wanted: Mapping[str, str]) -> str | None:
    """Return the file of the recipe for rows with these columns, or None if none is known.

    Args:
        wanted: {role: name of the column that was looked for}; its recipe is not the one.
    """
    for names, recipe in RECIPES_BY_COLUMNS:
        columns = set(names.split())
        if columns <= set(row) and not columns & set(wanted.values()):
            return recipe
    return None


def guess_columns(row: Row, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return {role: the column of a row that its name suggests}; {} unless all are found.

    Columns that already have the name of their role are found but left out.
    """
    free = [name for name in row if not is_number_of_row(name)]
    found = {}
    for role, name in wanted.items():
        fitting = [column for column in free if could_have_role(row[column], role)]
        column = guess_column(fitting, role, name)
        if column is None:
            return {}
        free.remove(column)
        found[role] = column
    return {role: column for role, column in found.items() if role != column}


def is_number_of_row(name: str) -> bool:
    """Return whether a column with this name only numbers the rows."""
    return name.lower() in ("id", "idx", "index", "uuid") or name.lower().endswith("_id")


def guess_column(names: Sequence[str], role: str, wanted: str) -> str | None:
    """Return the name that is most similar to what a role is called, or None if none is."""
    if wanted in names:
        return wanted
    close = difflib.get_close_matches(wanted, names, 1)
    if close:
        return close[0]
    for usual in USUAL_NAMES[role]:
        for name in names:
            is_in_it = len(usual) > 1 and usual in name.lower()
            if is_in_it or usual == name.lower():
                return name
    return None


def could_have_role(value: object, role: str) -> bool:
    """Return whether a column with this value could have a role; null says nothing about it."""
    if value is None or role == "image":
        return True
    if role in LISTS:
        return isinstance(value, list)
    if role == "label":
        return isinstance(value, (str, int, float))
    if role in ("chosen", "rejected") and isinstance(value, list):
        return True
    return isinstance(value, str)


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
