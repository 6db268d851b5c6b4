# SPDX-License-Identifier: Apache-2.0
"""Entities are those of seqeval's default mode, and so are precision, recall and F1 of them.

The package judges, where it is installed (requirements-dev.txt).
"""

import random

import pytest

from tasks.tags import are_of_entities, count_matches, find_entities, tag_metrics

KINDS = ("PER", "LOC", "B-TYPE")
SCHEMES = {
    "IOB2 and IOB1": ["O", *(f"{prefix}-{kind}" for prefix in "BI" for kind in KINDS)],
    "IOBES": ["O", *(f"{prefix}-{kind}" for prefix in "BIES" for kind in KINDS)],
    "BILOU": ["O", *(f"{prefix}-{kind}" for prefix in "BILU" for kind in KINDS)],
    "only prefixes": ["O", "B", "I", "E", "S"],
}


def in_bioes(tags):
    """Tags of any scheme with the letters that seqeval knows."""
    return [{"L": "E", "U": "S"}.get(tag[0], tag[0]) + tag[1:] for tag in tags]


def metrics_of(true, predicted):
    """What a recipe would log of these rows, counted row by row."""
    counts = sum(count_matches(*pair) for pair in zip(true, predicted, strict=True))
    return tag_metrics(counts.tolist())


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
        expected = sequence_labeling.get_entities(in_bioes(tags))
        assert [(kind or "_", *places) for kind, *places in find_entities(tags)] == expected
    found = metrics_of(true, predicted)
    true = [in_bioes(tags) for tags in true]
    predicted = [in_bioes(tags) for tags in predicted]
    assert found == {
        "eval_precision": seqeval.precision_score(true, predicted),
        "eval_recall": seqeval.recall_score(true, predicted),
        "eval_f1": seqeval.f1_score(true, predicted),
        "eval_accuracy": seqeval.accuracy_score(true, predicted),
    }


def test_tags_that_name_no_entities_have_accuracy_alone():
    assert are_of_entities(["O", "B-PER", "I-PER", "S-LOC", "B"])
    assert not are_of_entities(["NN", "VB"]) and not are_of_entities(["O", "person"])
    counts = count_matches(["NN", "VB"], ["NN", "NN"], has_entities=False)
    assert tag_metrics(counts.tolist(), has_entities=False) == {"eval_accuracy": 0.5}
