"""Columns that a row needs are asked for, and those that nothing reads are told."""

import pytest

from components.columns import TrackedRow, is_empty, note_unread, shorten, validate_texts


# ---- Texts and labels ----
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "has the columns text; needs text, label: see --text_columns and --label"),
        ({"label": 1}, "has the columns label; needs text, label"),
        ({"text": 5, "label": 1}, "has no text in text: 5$"),
        ({"text": " ", "label": 1}, "has no text in text: ' '$"),
        ({"text": None, "label": 1}, "has no text in text: null$"),
    ],
)
def test_texts_and_labels_have_to_be_there(row, says):
    with pytest.raises(ValueError, match=says):
        validate_texts(row, ["text"], "label")
    validate_texts({"text": "a", "label": None}, ["text"], "label")  # labels are looked at later
    validate_texts({"text": "a", "other": "", "label": 1}, ["text", "other"], "label")


def test_a_text_that_is_missing_in_a_pair_is_named_with_both_columns():
    row = {"sentence1": "a", "sentence2": None, "label": "a"}
    with pytest.raises(ValueError, match="in sentence1 and sentence2: 'a', null$"):
        validate_texts(row, ["sentence1", "sentence2"], "label")


# ---- What nothing reads ----
def test_a_row_knows_which_columns_were_read():
    row = TrackedRow({"text": "a", "label": 1, "source": "web"})
    assert row["text"] == "a" and row.get("missing") is None and "label" in row
    assert row.unread() == ["label", "source"]


def test_of_very_many_columns_the_first_are_named():
    counts = {f"column{number}": 3 for number in range(25)}
    note = note_unread(counts, 3)
    assert note.startswith("; not read: column0, column1, ") and note.endswith("19 and 5 more")
    assert note_unread({}, 3) == ""


# ---- Values in messages ----
@pytest.mark.parametrize("value", [None, "", " ", [], {}, "null", "[]", " {} "], ids=repr)
def test_empty_values(value):
    assert is_empty(value)


@pytest.mark.parametrize("value", [0, False, "a", ["a"], {"a": None}, "[1]"], ids=repr)
def test_values_that_are_not_empty(value):
    assert not is_empty(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (["a"], "a list of 1 part"), ([], "a list of 0 parts"), ("a" * 99, "a" * 80)],
)
def test_values_are_shortened_for_messages(value, text):
    assert shorten(value) == text
