# SPDX-License-Identifier: Apache-2.0
"""Every bad row is named, rows are prepared once, and what is held out is never trained on.

tests/launch/test_golden_rows.py has what comes of each file of row_files.py.
"""

import json
from collections import Counter
from dataclasses import dataclass, replace

import datasets
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from core.data import TrackedRow, hold_out_and_mix, read_rows, rename_columns
from example_arguments import RowFlags


@dataclass(frozen=True)
class Arguments(RowFlags):
    """What reading rows asks of a recipe's arguments."""

    dataset_weights: tuple = ()
    COLUMN_ROLES = ("text",)


def take(row):
    """Prepare a row as simply as can be."""
    if not row["text"]:
        raise ValueError("has no text")
    return {"text": row["text"], "length": len(row["text"]), "hash": hash(row["text"]) >> 1}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of datasets' cache, empty at first."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def read(tmp_path):
    """A function that writes files, {name: texts of its rows or content}, and reads those named."""

    def read_files(files, *names, prepare=take, **changes):
        for name, content in files.items():
            if isinstance(content, list):
                content = "\n".join(json.dumps({"text": text}) for text in content)
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        args = Arguments([str(tmp_path / name) for name in names or files])
        args = replace(args, **changes)
        return hold_out_and_mix(args, *read_rows(args, prepare))

    return read_files


def texts_of(rows):
    return rows.dataset["text"][:].tolist()


def numbers_of(rows):
    return rows.dataset["row"][:].tolist()


# ---- Bad rows ----
@pytest.mark.parametrize("skip_bad_rows", [False, True])
@pytest.mark.parametrize("num_proc", [None, 2])
def test_a_fault_of_what_prepares_is_no_bad_row_and_names_its_place(read, skip_bad_rows, num_proc):
    """Else an edit with a misspelt name would leave out every row that reaches it."""

    def misspelt(row):
        return take(row) if row["text"] == "a" else row["txet"]

    options = {"skip_bad_rows": skip_bad_rows, "dataset_num_proc": num_proc}
    with pytest.raises(KeyError) as raised:
        read({"train.jsonl": ["a"], "train2.jsonl": ["a", "b"]}, ".", prepare=misspelt, **options)
    assert raised.value.__notes__[0].endswith("train2.jsonl, line 2")


# ---- Columns ----
def test_columns_that_nothing_reads_are_told_of_all_rows(read):
    lines = [{"text": "a"}, {"text": "b", "url": "c"}, {"text": "b", "id, old": 1}]
    rows, _ = read({"rows.jsonl": "\n".join(map(json.dumps, lines))})
    assert rows.notes == "3; not read: url, id, old"


def test_a_row_is_read_under_the_names_of_roles():
    row = TrackedRow({"question": "a", "answer": "b", "input": "c", "url": "d"})
    renamed = rename_columns(row, {"prompt": "question", "completion": "answer"})
    assert renamed["prompt"] == "a" and renamed.get("completion") == "b"
    assert renamed["question"] is None and "input" in renamed  # what has a role has no other name
    assert row.unread() == ["input", "url"]  # to look for a column is not to read it
    swapped = rename_columns(
        {"prompt": "a", "completion": "b"}, {"prompt": "completion", "completion": "prompt"}
    )
    assert dict(swapped) == {"prompt": "b", "completion": "a"}


def test_classes_are_read_by_their_names(read, tmp_path):
    classes = ClassLabel(names=["no", "yes"])
    features = Features({"text": Value("string"), "label": classes, "tags": List(classes)})
    table = {"text": ["a", "b"], "label": [1, -1], "tags": [[0, 1], []]}
    Dataset.from_dict(table, features=features).to_parquet(tmp_path / "rows.parquet")

    def labels(row):
        return {"found": str([row["label"], row["tags"]])}

    rows, _ = read({}, "rows.parquet", prepare=labels)
    assert rows.dataset["found"][:].tolist() == ["['yes', ['no', 'yes']]", "[None, []]"]
    assert rows.sources[0].class_names == {"label": ["no", "yes"], "tags": ["no", "yes"]}


# ---- Held out ----
NUMBERS = {"rows.jsonl": [str(number) for number in range(1, 21)]}


@pytest.fixture
def held_out(read):
    """A function that returns the numbers trained on and those held out of the rows 1 to 20."""

    def split(share, eval_strategy="steps", **changes):
        rows, eval_rows = read(NUMBERS, eval_strategy=eval_strategy, eval_split=share, **changes)
        return numbers_of(rows), numbers_of(eval_rows) if eval_rows else None

    return split


@pytest.mark.parametrize(("share", "number"), [(0.1, 2), (0.001, 1), (0.5, 10), (1, 1), (7, 7)])
def test_each_row_is_trained_on_or_held_out(share, number, held_out):
    trained_on, evaluated_on = held_out(share)
    assert len(evaluated_on) == number
    assert sorted(trained_on + evaluated_on) == list(range(1, 21))
    assert trained_on == sorted(trained_on) and evaluated_on == sorted(evaluated_on)


def test_the_rows_held_out_follow_from_the_seed(held_out):
    assert held_out(3)[1] == [10, 15, 16]  # as ever, so that a run that began earlier continues
    assert held_out(0.25) == held_out(5) == held_out(0.25)
    assert held_out(0.25, seed=1) != held_out(0.25)
    # Whether a run evaluates may change when it is resumed, what it trains on may not
    assert held_out(0.25, eval_strategy="no") == (held_out(0.25)[0], None)


# ---- Several data sets ----
def sizes(**number_of):
    """Files with as many rows, each with another text."""
    return {
        f"{name}.jsonl": [f"{name}{i}" for i in range(1, n + 1)] for name, n in number_of.items()
    }


def test_rows_are_numbered_as_one_and_found_in_their_files(read, tmp_path):
    rows, _ = read(sizes(a=3, b=2), dataset_weights=[1, 3])
    assert f"{tmp_path / 'b.jsonl'} (numbered from 4): 2" in rows.notes
    for index, text in enumerate(texts_of(rows)):
        assert rows.place(index) == f"{tmp_path / text[0]}.jsonl, line {text[1:]}"


def test_weights_are_shares_of_as_many_rows_as_there_are(read):
    rows, _ = read(sizes(a=10, b=90), dataset_weights=[3, 1])
    assert Counter(text[0] for text in texts_of(rows)) == {"a": 75, "b": 25}
    times = Counter(texts_of(rows))
    assert {times[text] for text in times if text[0] == "a"} == {7, 8}
    assert {times[text] for text in times if text[0] == "b"} == {1}
    assert "mixed 3 : 1: 75 from the 10 rows of" in rows.notes
    rows, _ = read({}, "a.jsonl", "b.jsonl", "a.jsonl", dataset_weights=[0.1, 0.1, 0.1])
    assert len(rows) == 110 and " 36 from" in rows.notes and " 37 from" in rows.notes


def test_the_mixture_is_a_function_of_the_seed(read):
    rows, _ = read(sizes(a=4, b=6), dataset_weights=[1, 1])
    # As ever, so that a run that began earlier continues
    assert " ".join(texts_of(rows)) == "b5 b1 a1 b2 a4 a3 a4 b4 a2 b3"
    other, _ = read(sizes(a=4, b=6), dataset_weights=[1, 1], seed=7)
    assert texts_of(rows) != texts_of(other) and rows.fingerprint != other.fingerprint


def test_rows_that_are_held_out_are_never_trained_on_even_where_rows_are_repeated(read):
    options = {"dataset_weights": [3, 1], "eval_split": 0.2, "eval_strategy": "steps"}
    rows, held_out = read(sizes(a=10, b=90), **options)
    assert len(held_out) == 20 and len(rows) == 80
    assert not set(texts_of(rows)) & set(texts_of(held_out))
