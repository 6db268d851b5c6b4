# SPDX-License-Identifier: Apache-2.0
"""A row tells which of its columns were read, and is read under other names of its columns."""

import pytest

from core.data import TrackedRow, is_empty, rename_columns


# ---- What nothing reads ----
def test_a_row_knows_which_columns_were_read():
    row = TrackedRow({"text": "a", "label": 1, "source": "web"})
    assert row["text"] == "a" and row.get("missing") is None and "label" in row
    assert row.unread() == ["label", "source"]


# ---- Values in messages ----
@pytest.mark.parametrize("value", [None, "", " ", [], {}, "null", "[]", " {} "], ids=repr)
def test_empty_values(value):
    assert is_empty(value)


@pytest.mark.parametrize("value", [0, False, "a", ["a"], {"a": None}, "[1]"], ids=repr)
def test_values_that_are_not_empty(value):
    assert not is_empty(value)


# ---- Columns under other names ----
def test_a_row_is_read_under_the_names_of_roles():
    row = TrackedRow({"question": "a", "answer": "b", "input": "c", "url": "d"})
    renamed = rename_columns(row, {"prompt": "question", "completion": "answer"})
    assert renamed["prompt"] == "a" and renamed.get("completion") == "b"
    assert set(renamed) == {"prompt", "completion", "input", "url"} and "question" not in renamed
    assert row.unread() == ["input", "url"]  # to look for a column is not to read it


def test_columns_may_swap_their_names():
    row = {"prompt": "a", "completion": "b"}
    swapped = rename_columns(row, {"prompt": "completion", "completion": "prompt"})
    assert dict(swapped) == {"prompt": "b", "completion": "a"}
