# SPDX-License-Identifier: Apache-2.0
"""A Mistral with a sliding window, and short texts.

The window is shorter than a block of text. FOLDER/data has train.jsonl and test.jsonl, rows of
{"text"}: some sentences about a person with a made-up name, such as "Toble is a baker in Frim.
Every morning Toble goes to the mill and buys flour." What a baker buys, makes and dreams of is
always the same, while names and towns vary, so that a model has facts to learn and names to look
up. The people of test.jsonl are in no training text.
"""

import itertools
import random
from collections import namedtuple

from tiny.maker import DECODER, Maker, Row, Shape, different_words, make_word

# What a person of a trade does, which is the same in every story
Trade = namedtuple("Trade", "name place goods ware dream")
TRADES = (
    Trade("baker", "mill", "flour", "bread", "a bigger oven"),
    Trade("smith", "mine", "iron", "nails", "a golden hammer"),
    Trade("weaver", "farm", "wool", "blankets", "a silver loom"),
    Trade("potter", "river", "clay", "bowls", "a warmer kiln"),
    Trade("painter", "market", "colours", "pictures", "a house by the sea"),
    Trade("carpenter", "forest", "wood", "tables", "a sharper saw"),
    Trade("cook", "garden", "onions", "soup", "a copper kettle"),
    Trade("tailor", "harbour", "silk", "coats", "a visit of the queen"),
)
SENTENCES = (
    "Every morning {name} goes to the {trade.place} and buys {trade.goods}.",
    "In the afternoon {name} makes {trade.ware} of the {trade.goods}.",
    "In the evening {name} sells {trade.ware} to the people of {town}.",
    "At night {name} dreams of {trade.dream}.",
    "Everybody in {town} likes the {trade.ware} of {name}.",
    "Without {trade.goods} there is no work for a {trade.name}.",
)
SHAPE = DECODER | {"vocab_size": 512, "sliding_window": 48, "full_attention": False}


def settings_of(shape: Shape) -> Shape:
    """Return the settings of the configuration; with --full_attention there is no window."""
    settings = dict(shape)
    if settings.pop("full_attention"):
        settings["sliding_window"] = None
    return settings


MAKER = Maker(
    "mistral",
    "AutoModelForCausalLM",
    SHAPE,
    num_rows=(6000, 200),
    tokenizer="bytes",
    columns=("text",),
    settings=settings_of,
)


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test, which have no person in common."""
    rng = random.Random(seed)
    names = list(itertools.islice(different_words(rng), num_train_rows + num_test_rows))
    texts = [make_text(name.title(), rng) for name in names]
    rows = [{"text": text} for text in texts]
    rng.shuffle(rows)
    return {"train": rows[num_test_rows:], "test": rows[:num_test_rows]}


def make_text(name: str, rng: random.Random) -> str:
    """Return three to seven sentences about a person; the first one says who it is."""
    trade = rng.choice(TRADES)
    town = make_word(rng).capitalize()
    count = rng.randint(2, len(SENTENCES))
    chosen = sorted(rng.sample(range(len(SENTENCES)), count))
    story = [f"{name} is a {trade.name} in {town}."]
    for i in chosen:
        story.append(SENTENCES[i].format(name=name, town=town, trade=trade))
    return " ".join(story)
