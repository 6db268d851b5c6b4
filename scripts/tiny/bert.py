# SPDX-License-Identifier: Apache-2.0
"""A BERT, and made-up reviews.

FOLDER/data has train.jsonl and test.jsonl, rows of {"text", "label", "stars"}: reviews such as "the
soup was not very good and the waiter was kind", whose label (negative, mixed or positive, a class)
and stars (a number) follow from their words. "not" negates the word after it and "very" doubles it,
so that a model must read words together. No text of test.jsonl is in train.jsonl.
"""

import random

from tiny.maker import ENCODER, NO_DROPOUT, Maker, Row

THINGS = (
    "soup bread cake fish tea salad waiter room garden table music window price kitchen view chair"
).split()
GOOD = "good kind warm fresh clean lovely fine bright tasty quick".split()
BAD = "bad rude cold stale dirty ugly poor dark bland slow".split()
MAKER = Maker(
    "bert",
    "AutoModel",
    ENCODER | NO_DROPOUT | {"vocab_size": 320, "max_position_embeddings": 128},
    num_rows=(6000, 501),
    tokenizer="words",
    columns=("text",),
)


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; no text is repeated."""
    rng = random.Random(seed)
    row_of = {}
    while len(row_of) < num_train_rows + num_test_rows:
        row = make_row(rng)
        row_of.setdefault(row["text"], row)
    rows = list(row_of.values())
    rng.shuffle(rows)  # Short texts are soon used up, so that they would all come first.
    return {"train": rows[num_test_rows:], "test": rows[:num_test_rows]}


def make_row(rng: random.Random) -> Row:
    """Return a review of one to three clauses; the sum of their scores gives label and stars."""
    clauses = []
    score = 0
    for thing in rng.sample(THINGS, rng.randint(1, 3)):
        clause, points = make_clause(thing, rng)
        clauses.append(clause)
        score += points
    label = "mixed"
    if score:
        label = "positive" if score > 0 else "negative"
    return {"text": " and ".join(clauses), "label": label, "stars": 3.0 + score / 4}


def make_clause(thing: str, rng: random.Random) -> tuple[str, int]:
    """Return a clause about a thing, and its score from -2 to 2."""
    score, adjectives = rng.choice([(1, GOOD), (-1, BAD)])
    is_negated = rng.random() < 0.3
    is_doubled = rng.random() < 0.3
    words = ["the", thing, "was"]
    if is_negated:
        words.append("not")
        score = -score
    if is_doubled:
        words.append("very")
        score = 2 * score
    words.append(rng.choice(adjectives))
    return " ".join(words), score
