# SPDX-License-Identifier: Apache-2.0
"""Labels become classes or numbers, one that does not fit is named, and metrics are correct."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features

from core.data import Rows, Source
from tasks.labels import (
    add_labels,
    describe_classes,
    find_classes,
    label_metrics,
    read_label,
)


def arguments(problem_type=None, class_weights="none"):
    return SimpleNamespace(problem_type=problem_type, class_weights=class_weights)


def rows_of(labels, split="train"):
    """Prepared rows of nothing but labels; those without one are left out."""
    prepared = []
    for number, label in enumerate(labels, 1):
        prepared.append({"row": number} | read_label(label, "label"))
    dataset = Dataset.from_list(prepared).with_format("numpy")
    source = Source(f"{split}.jsonl", (Path(f"{split}.jsonl"),), dataset)
    return Rows(dataset, f"{len(labels)}, 0 left out", [source])


def labeled(train, held_out=None, **options):
    """Return rows to train on and to evaluate on, with labels and weights, and the classes."""
    args = arguments(**options)
    train_rows = rows_of(train)
    classes = find_classes(train_rows, args, "label", None)
    eval_rows = None
    if held_out is not None:
        eval_rows = add_labels(rows_of(held_out, "test"), classes, args)
    return add_labels(train_rows, classes, args), eval_rows, classes


# ---- All labels ----
@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "c", "a"], ["a", "b", "c"]),  # names by the alphabet
        ([10, 9, 2, 9], ["2", "9", "10"]),  # numbers by their size
        ([True, False], ["False", "True"]),
        ([0.5, 1.0, 2], []),  # numbers to learn
    ],
    ids=str,
)
def test_labels_say_what_is_learned(labels, names):
    rows, _, classes = labeled(labels)
    assert list(classes) == names
    by_hand = labels if not names else [names.index(str(label)) for label in labels]
    assert rows.dataset["labels"][:].tolist() == by_hand
    assert rows.dataset["weights"][:].tolist() == [1.0] * len(labels)
    told = describe_classes(classes)
    assert told.startswith(f"{len(names)} classes: {names[0]} " if names else "numbers")


def test_classes_that_a_data_set_numbers_keep_their_order():
    names = ["some", "none", "all"]
    rows = rows_of(["all", "some", "none", "some"])
    features = Features({"label": ClassLabel(names=[*names, "other"])})
    numbered = Source("train.parquet", (), Dataset.from_dict({"label": []}, features=features))
    rows = replace(rows, sources=[numbered])
    classes = find_classes(rows, arguments(), "label", None)
    assert list(classes) == names
    numbered = add_labels(rows, classes, arguments()).dataset["labels"]
    assert numbered[:].tolist() == [2, 0, 1, 0]


@pytest.mark.parametrize(
    ("train", "held_out", "options", "code", "words"),
    [
        (["a", "b"], ["a", "c"], {}, "65", ["test.jsonl, line 2", "'c'", "those have a, b"]),
        (["a", "a"], None, {}, "65", ["all rows have the label 'a'", "nothing to tell apart"]),
        ([1.5, 2.5], None, {"class_weights": "balanced"}, "64", ["has regression targets"]),
        ([1.5, 2.5], [0.5, "high"], {}, "65", ["test.jsonl, line 2", "is not a number"]),
    ],
    ids=[
        "class of no training row",
        "one class",
        "weights of numbers",
        "text among numbers",
    ],
)
def test_labels_that_do_not_fit_are_named(train, held_out, options, code, words, capsys):
    with pytest.raises(SystemExit, match=code):
        labeled(train, held_out, **options)
    message = capsys.readouterr().err
    assert all(word in message for word in words), message


def test_balanced_weights_make_all_classes_weigh_the_same():
    labels = ["a"] * 6 + ["b"] * 2 + ["c"]
    rows, eval_rows, _ = labeled(labels, ["c", "a"], class_weights="balanced")
    weights = rows.dataset["weights"][:].tolist()
    # rows / (classes x rows of the class)
    assert weights == pytest.approx([9 / 18] * 6 + [9 / 6] * 2 + [9 / 3])
    assert sum(weights) == pytest.approx(9)
    # Those of the training rows
    assert eval_rows.dataset["weights"][:].tolist() == pytest.approx([3, 0.5])


# ---- Metrics ----
def metrics(predicted, true):
    return label_metrics(torch.tensor(predicted), torch.tensor(true))


def test_accuracy_and_f1_are_those_of_the_rows():
    # Class 0: 2 right of 3 predicted, 3 true: F1 2/3. Classes 1 and 2: 1 right, 2, 2: 1/2. Class 3
    # does not occur, 4 does
    found = metrics([0, 0, 1, 1, 2, 0, 2, 4], [0, 0, 0, 1, 1, 2, 2, 4])
    assert found == pytest.approx(
        {"eval_accuracy": 5 / 8, "eval_f1": (2 / 3 + 1 / 2 + 1 / 2 + 1) / 4}
    )


def test_a_class_that_is_predicted_and_never_true_lowers_f1():
    found = metrics([0, 0, 1], [0, 0, 0])  # class 0: 2 right, 2 predicted, 3 true: 4/5; class 1: 0
    assert found == pytest.approx({"eval_accuracy": 2 / 3, "eval_f1": 0.4})


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_squared_error_and_correlation_are_those_of_the_rows(offset):
    true, told = np.array([1.0, 2, 3, 4, 5, 9]) + offset, np.array([1.5, 1, 3, 5, 4, 7]) + offset
    found = metrics(told.astype(np.float32), true.astype(np.float32))
    assert found["eval_mse"] == pytest.approx((0.25 + 1 + 0 + 1 + 1 + 4) / 6)
    assert found["eval_pearson"] == pytest.approx(np.corrcoef(true, told)[0, 1])
