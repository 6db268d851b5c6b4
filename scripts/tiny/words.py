# SPDX-License-Identifier: Apache-2.0
"""Made-up words: short, easy to read, and in no vocabulary."""

import random
from collections.abc import Iterator

ONSETS = "b c d f g h j k l m n p qu r s t v w y z bl br ch cl dr fl fr gr pl sh st th tr".split()
VOWELS = "a e i o u".split()
CODAS = "b ck d f g k l ll lk lp m mp n nd nt p r rk rm s sh st t w x z".split()
LONGEST_WORD = 6


def make_syllable(rng: random.Random) -> str:
    """Return a consonant or two and a vowel."""
    return rng.choice(ONSETS) + rng.choice(VOWELS)


def make_word(rng: random.Random) -> str:
    """Return a made-up word of 3 to 6 letters, such as lamp, toble or frimas."""
    while True:
        first = make_syllable(rng)
        second = make_syllable(rng)
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
