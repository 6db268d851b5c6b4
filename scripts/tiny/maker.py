# SPDX-License-Identifier: Apache-2.0
"""What the maker of a recipe says of its model and of its rows, and made-up words for these.

Nothing here imports torch.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

Row = dict[str, Any]
# {setting of a configuration of transformers: its default}. Each is a flag too.
Shape = dict[str, Any]
ENCODER: Shape = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
DECODER: Shape = ENCODER | {
    "intermediate_size": 384,
    "num_key_value_heads": None,  # as many as num_attention_heads
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
NO_DROPOUT: Shape = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Made-up words are short, easy to read, and in no vocabulary
ONSETS = "b c d f g h j k l m n p qu r s t v w y z bl br ch cl dr fl fr gr pl sh st th tr".split()
VOWELS = "a e i o u".split()
CODAS = "b ck d f g k l ll lk lp m mp n nd nt p r rk rm s sh st t w x z".split()
LONGEST_WORD = 6


@dataclass(frozen=True)
class Maker:
    """How the model of a recipe is made, and how many rows.

    Attributes:
        model_type: transformers' name of the kind of model.
        auto_class: the class of transformers that makes one with its head.
        shape: of the model.
        num_rows: rows to train on and to test on, by default.
        tokenizer: a key of TOKENIZERS in models.py; None if the model sees images.
        columns: of the rows, on whose texts the tokenizer is trained.
        settings: a function from the shape to the settings of the configuration.
        has_teacher: whether FOLDER/teacher is made too, a model with the same tokenizer.
        image_size: of the images, in pixels, if the model reads them beside text.
    """

    model_type: str
    auto_class: str
    shape: Shape
    num_rows: tuple[int, int]
    tokenizer: str | None = None
    columns: tuple[str, ...] = ()
    settings: Callable[[Shape], Shape] = dict
    has_teacher: bool = False
    image_size: int | None = None


def make_word(rng: random.Random) -> str:
    """Return a made-up word of 3 to 6 letters, such as lamp, toble or frimas."""
    while True:
        first = rng.choice(ONSETS) + rng.choice(VOWELS)
        second = rng.choice(ONSETS) + rng.choice(VOWELS)
        coda = rng.choice(CODAS)
        word = rng.choice([first + coda, first + second, first + second + coda])
        if len(word) <= LONGEST_WORD and "uu" not in word:
            return word


def different_words(rng: random.Random) -> Iterator[str]:
    """Yield made-up words without end, never the same one twice."""
    seen = set()
    while True:
        word = make_word(rng)
        if word not in seen:
            seen.add(word)
            yield word
