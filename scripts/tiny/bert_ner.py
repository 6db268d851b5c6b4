# SPDX-License-Identifier: Apache-2.0
"""A BERT, and sentences with made-up names.

FOLDER/data has train.jsonl and test.jsonl, rows of {"tokens", "ner_tags"}: the words of sentences
such as "brod lamo works for frim", and the tag of each: B-PER, I-PER, B-ORG, I-ORG, B-LOC, I-LOC or
O. A name has one word or two, and the same word may name a person, an organization or a place, so a
model has to read what stands around it. No word of a name in test.jsonl is in train.jsonl.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from tiny import bert
from tiny.maker import Row, different_words

# The words around a name show what kind of name it is
SENTENCES = (
    "PER works for ORG",
    "PER left ORG for ORG",
    "PER lives in LOC",
    "PER and PER met in LOC",
    "PER went from LOC to LOC",
    "ORG hired PER",
    "ORG opened an office in LOC",
    "ORG sold its shares to ORG",
    "yesterday PER was seen near LOC",
    "a speaker of ORG said that PER is well",
    "the road to LOC is closed",
    "nobody was there",
)
KINDS = ("PER", "ORG", "LOC")
NUM_TRAIN_WORDS = 1000  # words that names are made of
NUM_TEST_WORDS = 200
MAKER = replace(bert.MAKER, num_rows=(4000, 300), columns=("tokens",))


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; no word of a name is in both."""
    rng = random.Random(seed)
    words = list(islice(different_words(rng), NUM_TRAIN_WORDS + NUM_TEST_WORDS))
    train_words = words[:NUM_TRAIN_WORDS]
    test_words = words[NUM_TRAIN_WORDS:]
    return {
        "train": [make_row(rng, train_words) for _ in range(num_train_rows)],
        "test": [make_row(rng, test_words) for _ in range(num_test_rows)],
    }


def make_row(rng: random.Random, words: Sequence[str]) -> Row:
    """Return a sentence whose names are made of these words, and the tag of each of its words."""
    row: Row = {"tokens": [], "ner_tags": []}
    for word in rng.choice(SENTENCES).split():
        if word in KINDS:
            name = rng.sample(words, rng.randint(1, 2))
            row["tokens"] += name
            row["ner_tags"] += [f"B-{word}", f"I-{word}"][: len(name)]
        else:
            row["tokens"].append(word)
            row["ner_tags"].append("O")
    return row
