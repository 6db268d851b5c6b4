# SPDX-License-Identifier: Apache-2.0
"""Columns that a row needs are asked for, and those that nothing reads are told."""

import pytest

from components.columns import (
    TrackedRow,
    advise_columns,
    is_empty,
    note_unread,
    rename_columns,
    shorten,
    validate_texts,
)
from launching import REPO


# ---- Texts and labels ----
@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"text": "a"}, "has the columns text; needs text, label: pass --columns label=COLUMN, or"),
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


def test_without_columns_a_row_stays_as_it_is():
    row = {"prompt": "a"}
    assert rename_columns(row, {}) is row


def test_a_column_that_a_row_lacks_is_named_with_the_nearest():
    says = "has no column qestion, which --columns names as prompt: did you mean question?"
    with pytest.raises(ValueError, match=says):
        rename_columns({"question": "a", "answer": "b"}, {"prompt": "qestion"})


@pytest.mark.parametrize(
    ("row", "wanted", "advice"),
    [
        ({"id": "7", "request": "a", "reply": "b"}, "prompt completion", "prompt=request compl"),
        ({"q": "a", "a": "b"}, "prompt completion", "prompt=q completion=a"),
        (
            {"Answer": "a", "Question": "b"},
            "prompt completion",
            "prompt=Question completion=Answer",
        ),
        ({"my question": "a", "reply": "b"}, "prompt completion", "'prompt=my question' comp"),
        ({"prompt": "a", "reply": "b"}, "prompt completion", "completion=reply"),
        ({"prompt": "a", "good": [{}], "bad": [{}]}, "chosen rejected", "chosen=good rejected=bad"),
        ({"review": "a", "stars": 5}, "text label", "text=review label=stars"),
        ({"words": ["a"], "ner": ["O"]}, "tokens tags", "tokens=words tags=ner"),
        ({"title": "a", "article": "b"}, "source target", "source=article target=title"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_columns_that_are_most_likely_meant_are_advised(row, wanted, advice):
    fix = advise_columns(row, {role: role for role in wanted.split()}, "PLACE")
    assert fix.startswith(f"pass --columns {advice}") and fix.endswith(", or edit PLACE")


@pytest.mark.parametrize(
    ("row", "wanted", "pairs"),
    [
        ({"frage": "a", "antwort": "b"}, "prompt completion", "prompt=COLUMN completion=COLUMN"),
        ({"question": "a", "answer": 1}, "prompt completion", "prompt=COLUMN completion=COLUMN"),
        ({"prompt": "a", "antwort": "b"}, "prompt completion", "completion=COLUMN"),
        ({"user_id": 1, "uuid": "b"}, "text label", "text=COLUMN label=COLUMN"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_where_no_name_is_similar_the_flag_is_named_without_a_guess(row, wanted, pairs):
    roles = {role: role for role in wanted.split()}
    fix = advise_columns(row, roles, "PLACE")
    assert fix.endswith(f"pass --columns {pairs}, or edit PLACE")


@pytest.mark.parametrize(
    ("columns", "wanted", "recipe"),
    [
        ("question answer", "chosen rejected", "llama.py"),
        ("prompt completion", "text label", "llama.py"),
        ("messages source", "text", "llama.py"),
        ("prompt chosen rejected", "prompt completion", "llama_dpo.py"),
        ("text label", "chosen rejected", "bert.py"),
        ("id text", "prompt completion", "mistral_pretrain.py"),
    ],
)
def test_rows_of_another_recipe_are_told_with_its_name(columns, wanted, recipe):
    row = dict.fromkeys(columns.split(), "a")
    fix = advise_columns(row, {role: role for role in wanted.split()}, "PLACE")
    assert fix.startswith(f"use recipes/{recipe}, which is for such rows, or pass --columns ")
    assert "=COLUMN" in fix and (REPO / "recipes" / recipe).is_file()


@pytest.mark.parametrize(("separator", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_file_with_another_separator_is_told_how_to_be_saved(separator, name):
    wanted = {"prompt": "prompt", "completion": "completion"}
    fix = advise_columns({f"prompt{separator}completion": "a"}, wanted, "PLACE")
    assert fix == f"its columns seem to be separated by {name}: save the file with commas"
