# SPDX-License-Identifier: Apache-2.0
"""Entities are those of seqeval's default mode, and so are precision, recall and F1 of them.

One test compares with the package, where it is installed (requirements-dev.txt); the results of
seqeval 1.2.2 are recorded beside the sequences of the others.
"""

import random

import numpy as np
import pytest

from tasks.tags import are_of_entities, count_matches, find_entities, tag_metrics

KINDS = ("PER", "LOC", "B-TYPE")
SCHEMES = {
    "IOB2 and IOB1": ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in KINDS)],
    "IOBES": ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in KINDS)],
    "only prefixes": ["O", "B", "I", "E", "S"],
}


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("", []),
        ("O O", []),
        ("B-PER I-PER O B-LOC", [("PER", 0, 1), ("LOC", 3, 3)]),
        ("B-PER B-PER I-PER", [("PER", 0, 0), ("PER", 1, 2)]),
        ("I-PER I-PER B-PER", [("PER", 0, 1), ("PER", 2, 2)]),  # IOB1
        ("O I-PER I-LOC", [("PER", 1, 1), ("LOC", 2, 2)]),
        ("B-PER I-LOC I-PER", [("PER", 0, 0), ("LOC", 1, 1), ("PER", 2, 2)]),
        ("S-PER B-PER E-PER I-PER", [("PER", 0, 0), ("PER", 1, 2), ("PER", 3, 3)]),
    ],
)
def test_entities_are_found_in_any_sequence(tags, entities):
    assert find_entities(tags.split()) == entities


def metrics_of(true, predicted):
    """What a recipe would log of these rows, counted row by row."""
    counts = sum(count_matches(*pair) for pair in zip(true, predicted, strict=True))
    return tag_metrics(counts.tolist())


def test_the_example_of_seqeval_has_its_result():
    true = ["O O O B-MISC I-MISC I-MISC O".split(), "B-PER I-PER O".split()]
    predicted = ["O O B-MISC I-MISC I-MISC I-MISC O".split(), "B-PER I-PER O".split()]
    expected = {"eval_precision": 0.5, "eval_recall": 0.5, "eval_f1": 0.5, "eval_accuracy": 0.8}
    assert metrics_of(true, predicted) == expected


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("seed", range(20))
def test_metrics_of_random_tags_are_exactly_those_of_seqeval(scheme, seed):
    seqeval = pytest.importorskip(
        "seqeval.metrics", reason="not installed: see requirements-dev.txt"
    )
    sequence_labeling = pytest.importorskip("seqeval.metrics.sequence_labeling")
    rng = random.Random(seed)
    true, predicted = [], []
    for _ in range(50):
        tags = rng.choices(SCHEMES[scheme], k=rng.randint(1, 12))
        other = rng.choices(SCHEMES[scheme], k=len(tags))
        is_kept = [rng.random() < 0.8 for _ in tags]
        true.append(tags)
        predicted.append(
            [one if kept else two for one, two, kept in zip(tags, other, is_kept, strict=True)]
        )
    for tags in [*true, *predicted]:
        expected = sequence_labeling.get_entities(tags)
        assert [(kind or "_", *places) for kind, *places in find_entities(tags)] == expected
    assert metrics_of(true, predicted) == {
        "eval_precision": seqeval.precision_score(true, predicted),
        "eval_recall": seqeval.recall_score(true, predicted),
        "eval_f1": seqeval.f1_score(true, predicted),
        "eval_accuracy": seqeval.accuracy_score(true, predicted),
    }


def test_metrics_do_not_depend_on_the_cut_into_ranks_and_batches():
    rng = np.random.default_rng(0)
    tags = SCHEMES["IOB2 and IOB1"]
    rows = [(rng.choice(tags, 9).tolist(), rng.choice(tags, 9).tolist()) for _ in range(40)]
    counts = [count_matches(true, predicted) for true, predicted in rows]
    whole = tag_metrics(sum(counts).tolist())
    assert 0 < whole["eval_f1"] < 1
    for ranks in (2, 3, 40):
        of_ranks = [sum(counts[rank::ranks]) for rank in range(ranks)]
        assert tag_metrics(sum(of_ranks).tolist()) == whole


def test_tags_that_name_no_entities_have_accuracy_alone():
    assert are_of_entities(["O", "B-PER", "I-PER", "S-LOC", "B"])
    assert not are_of_entities(["NN", "VB"]) and not are_of_entities(["O", "person"])
    counts = count_matches(["NN", "VB"], ["NN", "NN"], has_entities=False)
    assert tag_metrics(counts.tolist(), has_entities=False) == {"eval_accuracy": 0.5}
