# SPDX-License-Identifier: Apache-2.0
"""A T5, and sentences with their translation.

FOLDER/data has train.jsonl and test.jsonl, rows of {"source", "target"}: English sentences such as
"the small dog sees a red ship" and their translation into a made-up language, "nuka keva zovo rozi
fida bipo pizu". Each word has its counterpart there, and the order differs: adjectives follow their
noun, articles come last, the verb ends the sentence. No sentence of test.jsonl is in train.jsonl.
"""

import random

from tiny.maker import ENCODER, Maker, Row, Shape

ARTICLES = "the a this every".split()
ADJECTIVES = "small big red new quick quiet".split()
NOUNS = "dog cat horse ship child king river tree house bird".split()
VERBS = "sees finds likes follows draws hears".split()
CONSONANTS = "bdfgklmnprstvz"
VOWELS = "aeiou"


def settings_of(shape: Shape) -> Shape:
    """Return the settings of the configuration by T5's own names; both halves have all layers."""
    width = shape["hidden_size"]
    heads = shape["num_attention_heads"]
    return {
        "vocab_size": shape["vocab_size"],
        "d_model": width,
        "d_ff": shape["intermediate_size"],
        "d_kv": width // heads,
        "num_heads": heads,
        "num_layers": shape["num_hidden_layers"],
        "dropout_rate": 0.0,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,  # the padding token, as in every T5
    }


MAKER = Maker(
    "t5",
    "AutoModelForSeq2SeqLM",
    ENCODER | {"num_attention_heads": 8, "vocab_size": 320},
    num_rows=(4000, 200),
    tokenizer="sentences",
    columns=("source", "target"),
    settings=settings_of,
)


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; no sentence is repeated."""
    rng = random.Random(seed)
    dictionary = make_dictionary(seed)
    row_of = {}
    while len(row_of) < num_train_rows + num_test_rows:
        row = make_row(rng, dictionary)
        row_of[row["source"]] = row
    rows = list(row_of.values())
    return {"train": rows[num_test_rows:], "test": rows[:num_test_rows]}


def make_dictionary(seed: int) -> dict[str, str]:
    """Return a made-up word such as keva or bipo for each English word, all different."""
    rng = random.Random(seed)
    dictionary: dict[str, str] = {}
    words = [*ARTICLES, *ADJECTIVES, *NOUNS, *VERBS]
    while len(dictionary) < len(words):
        letters = [rng.choice(group) for group in (CONSONANTS, VOWELS, CONSONANTS, VOWELS)]
        foreign = "".join(letters)
        if foreign not in dictionary.values():
            dictionary[words[len(dictionary)]] = foreign
    return dictionary


def make_row(rng: random.Random, dictionary: dict[str, str]) -> Row:
    """Return a sentence of subject, verb and object, and its translation.

    The translation has subject, object and verb, and each noun stands before its adjective and its
    article.
    """
    verb = rng.choice(VERBS)
    subject, foreign_subject = make_phrase(rng)
    thing, foreign_thing = make_phrase(rng)
    source = [*subject, verb, *thing]
    target = [dictionary[word] for word in (*foreign_subject, *foreign_thing, verb)]
    return {"source": " ".join(source), "target": " ".join(target)}


def make_phrase(rng: random.Random) -> tuple[list[str], list[str]]:
    """Return a noun phrase of English words, in English order and in that of the language."""
    article = rng.choice(ARTICLES)
    noun = rng.choice(NOUNS)
    adjectives = rng.sample(ADJECTIVES, rng.randint(0, 1))
    return [article, *adjectives, noun], [noun, *adjectives, article]
