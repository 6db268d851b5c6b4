# SPDX-License-Identifier: Apache-2.0
"""Skills that a tiny language model can learn: each asks something about a word or a number.

The split is by word and by number: no training prompt of any skill asks about what a test prompt
asks about, so a model that answers the test prompts has learned the skills and not the rows.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from tiny.words import different_words

NUMBERS = range(1, 1000)
NUM_WORDS = 8000

Row = dict[str, str]


@dataclass(frozen=True)
class Skill:
    """A question, and how to find its answer."""

    name: str
    about: str  # "word" or "number"
    question: str  # with {} where the word or the number stands
    answer: Callable[[str], str]


def backwards(word: str) -> str:
    """Return the word from its last letter to its first."""
    return word[::-1]


def twice(word: str) -> str:
    """Return the word two times."""
    return f"{word} {word}"


def last_letter(word: str) -> str:
    """Return the last letter of the word."""
    return word[-1]


def number_of_letters(word: str) -> str:
    """Return the number of letters of the word."""
    return str(len(word))


def next_number(number: str) -> str:
    """Return the number that follows."""
    return str(int(number) + 1)


SPELL = Skill("spell", "word", "Spell the word {}.", "-".join)
CAPITALS = Skill("capitals", "word", "Write {} in capitals.", str.upper)
BACKWARDS = Skill("backwards", "word", "Write {} backwards.", backwards)
REPEAT = Skill("repeat", "word", "Say {} twice.", twice)
LAST_LETTER = Skill("last_letter", "word", "What is the last letter of {}?", last_letter)
COUNT = Skill("count", "word", "How many letters are in {}?", number_of_letters)
NEXT_NUMBER = Skill("next_number", "number", "What comes after {}?", next_number)
SKILLS = (SPELL, CAPITALS, BACKWARDS, REPEAT, LAST_LETTER, COUNT, NEXT_NUMBER)

# At least three quarters of the numbers are left to train on.
MOST_TEST_ROWS = len(SKILLS) * (len(NUMBERS) // 4)


def shuffled_numbers(rng: random.Random) -> list[str]:
    """Return all numbers in a random order."""
    return [str(number) for number in rng.sample(NUMBERS, len(NUMBERS))]


def make_row(skill: Skill, item: str) -> Row:
    """Return a question of a skill about a word or a number, with its answer."""
    question = skill.question.format(item)
    return {"prompt": question, "completion": skill.answer(item), "skill": skill.name}


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train and test; the skills take turns in both."""
    rng = random.Random(seed)
    words = list(itertools.islice(different_words(rng), NUM_WORDS))
    pools = {"word": words, "number": shuffled_numbers(rng)}

    test = []
    while len(test) < num_test_rows:
        # All skills ask about the same word or number, which is removed from the pools.
        held_out = {kind: pool.pop() for kind, pool in pools.items()}
        test += [make_row(skill, held_out[skill.about]) for skill in SKILLS]

    train = []
    for skill in itertools.islice(itertools.cycle(SKILLS), num_train_rows):
        train.append(make_row(skill, rng.choice(pools[skill.about])))
    return {"train": train, "test": test[:num_test_rows]}
