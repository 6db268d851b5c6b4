# SPDX-License-Identifier: Apache-2.0
"""A BERT, and queries with a document that says the same in other words, and one that does not.

FOLDER/data has train.jsonl and test.jsonl, rows of {"query", "positive", "negative"}: who wants
what, and where. Queries and documents share no word for any of the three, so that a model has to
learn which words mean the same. The negative differs in one of them. No query of test.jsonl is in
train.jsonl.
"""

import itertools
import random
from collections.abc import Sequence

from tiny.maker import ENCODER, NO_DROPOUT, Maker, Row

# A word of queries, and one of documents
WHO = (
    "doctor/physician cook/chef teacher/tutor child/kid farmer/grower sailor/mariner "
    "lawyer/attorney writer/author singer/vocalist thief/robber soldier/warrior king/ruler"
)
WHAT = (
    "car/automobile boat/ship house/home coat/jacket stone/rock gift/present picture/image "
    "meal/dinner answer/reply job/work story/tale money/cash"
)
WHERE = (
    "sea/ocean wood/forest hill/mountain town/city road/street shop/store field/meadow "
    "river/stream school/college church/chapel camp/tents harbor/port"
)
PLACES = [WHO.split(), WHAT.split(), WHERE.split()]
MAKER = Maker(
    "bert",
    "AutoModel",
    ENCODER | NO_DROPOUT | {"vocab_size": 320, "max_position_embeddings": 128},
    num_rows=(1400, 300),
    tokenizer="words",
    columns=("query", "positive"),
)


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; no query is in both, or twice in test."""
    rng = random.Random(seed)
    meanings = list(itertools.product(*PLACES))
    rng.shuffle(meanings)
    test = [make_row(meaning, rng) for meaning in meanings[:num_test_rows]]
    rest = itertools.islice(itertools.cycle(meanings[num_test_rows:]), num_train_rows)
    return {"train": [make_row(meaning, rng) for meaning in rest], "test": test}


def make_row(meaning: tuple[str, ...], rng: random.Random) -> Row:
    """Return a query, the document that means the same, and one of which one word is another.

    Args:
        meaning: who wants what, and where, with the words of both.
    """
    who, what, where = (words.split("/")[0] for words in meaning)
    place = rng.randrange(len(meaning))
    others = [words for words in PLACES[place] if words != meaning[place]]
    changed = list(meaning)
    changed[place] = rng.choice(others)
    return {
        "query": f"the {who} by the {where} wants the {what}",
        "positive": document_of(meaning),
        "negative": document_of(changed),
    }


def document_of(meaning: Sequence[str]) -> str:
    """Return a document about who wants what, and where, in the words of documents."""
    who, what, where = (words.split("/")[1] for words in meaning)
    return f"for the {who} , the {what} near the {where}"
