# SPDX-License-Identifier: Apache-2.0
"""Sentences with made-up names of people, organizations and places, for a tiny BERT."""

import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from tiny import output, tokenizers
from tiny.bert import FLAGS, make_model
from tiny.options import BertNerOptions
from tiny.words import different_words

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

Row = dict[str, list[str]]


def make(folder: Path, options: BertNerOptions) -> None:
    """Write the model and the sentences; print how to train on them unless quiet."""
    files = make_rows(options.num_train_rows, options.num_test_rows, options.seed)
    texts = [" ".join(row["tokens"]) for row in files["train"]]
    max_length = options.max_position_embeddings
    tokenizer = tokenizers.word_piece(texts, options.vocab_size, max_length)
    model = make_model(tokenizer, options)
    with output.writing_to(folder):
        output.save_model(folder / "model", model, tokenizer, f"{len(tokenizer)} tokens")
        output.write_files(folder / "data", files)
    if not options.quiet:
        output.print_launch("bert_ner", folder, FLAGS)


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
