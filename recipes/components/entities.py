# SPDX-License-Identifier: Apache-2.0
"""Entities in sequences of tags, and how many were found, as seqeval counts them.

The tags are those of IOB2, IOB1 and IOBES: B-PER, I-PER, E-PER, S-PER and O. BILOU has L and U for
E and S, and BMES has M for I; B_PER is read as B-PER. A sequence need not be well-formed; it is
read as conlleval and seqeval's default mode read it.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

OUTSIDE = "O"
TAG = re.compile(r"O|[BIESLUM]([-_].*)?")
STARTS = ("B", "S", "U")  # Prefixes of tags at which an entity always begins
ENDS = ("O", "E", "S", "L", "U")  # Prefixes of tags after which an entity always begins

Entity = tuple[str, int, int]  # its type, and the places of its first and last word


def are_of_entities(tags: Iterable[str]) -> bool:
    """Return whether tags name entities, and not, for example, parts of speech."""
    return all(TAG.fullmatch(tag) for tag in tags)


def find_entities(tags: Sequence[str]) -> list[Entity]:
    """Return the entities of a sequence of tags, in their order.

    An entity begins at a B or S, at the first tag after an O, E or S, and where the type changes.
    """
    entities: list[Entity] = []
    first = 0
    before = OUTSIDE
    for place, tag in enumerate([*tags, OUTSIDE]):  # The added tag ends the last entity.
        is_new = tag[0] in STARTS or before[0] in ENDS or tag[2:] != before[2:]
        if before != OUTSIDE and (is_new or tag == OUTSIDE):
            entities.append((before[2:], first, place - 1))
        if is_new:
            first = place
        before = tag
    return entities


def count_matches(
    true: Sequence[str], predicted: Sequence[str], has_entities: bool = True
) -> np.ndarray:
    """Return the counts of a row, of which `tag_metrics` takes the sum over all rows.

    Args:
        true, predicted: the tag of each word.
        has_entities: whether the tags name entities.

    Returns:
        Five numbers: all words, correctly tagged words; true entities, predicted entities, and
        those that are both.
    """
    correct = sum(one == other for one, other in zip(true, predicted, strict=True))
    counts = [len(true), correct, 0, 0, 0]
    if has_entities:
        true_entities = set(find_entities(true))
        found = set(find_entities(predicted))
        counts[2:] = [len(true_entities), len(found), len(true_entities & found)]
    return np.array(counts)


def tag_metrics(counts: Sequence[int], has_entities: bool = True) -> Mapping[str, float]:
    """Return precision, recall and F1 of entities, and the accuracy of words.

    A quotient without a denominator is 0, as with seqeval.

    Args:
        counts: the sum of what `count_matches` returned.
    """
    words, correct, true, predicted, found = counts
    accuracy = {"eval_accuracy": correct / words}
    if not has_entities:
        return accuracy
    precision = found / predicted if predicted else 0.0
    recall = found / true if true else 0.0
    f1 = 0.0
    if found:
        f1 = 2 * precision * recall / (precision + recall)
    return {"eval_precision": precision, "eval_recall": recall, "eval_f1": f1, **accuracy}
