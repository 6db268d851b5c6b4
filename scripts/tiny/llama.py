# SPDX-License-Identifier: Apache-2.0
"""A Llama with a chat template, and rows of seven skills.

FOLDER/data has train.jsonl and test.jsonl, rows of {"prompt", "completion", "skill"}, each of which
asks something about a made-up word or a number. No training prompt of any skill asks about what a
test prompt asks about, so a model that answers these has learned the skills and not the rows.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from tiny.maker import DECODER, Maker, Row, different_words

NUMBERS = range(1, 1000)
NUM_WORDS = 8000
MAKER = Maker("llama", "AutoModelForCausalLM", DECODER, num_rows=(18200, 700), tokenizer="chat")


@dataclass(frozen=True)
class Skill:
    """A question, how to find its answer, and a typical mistake."""

    name: str
    about: str  # "word" or "number"
    question: str  # with {} where the word or the number stands
    answer: Callable[[str], str]
    mistake: Callable[[str], str] = str


SPELL = Skill("spell", "word", "Spell the word {}.", "-".join, " ".join)
CAPITALS = Skill("capitals", "word", "Write {} in capitals.", str.upper, str)
BACKWARDS = Skill("backwards", "word", "Write {} backwards.", lambda word: word[::-1])
REPEAT = Skill("repeat", "word", "Say {} twice.", lambda word: f"{word} {word}")
LAST_LETTER = Skill(
    "last_letter",
    "word",
    "What is the last letter of {}?",
    lambda word: word[-1],
    lambda word: word[0],
)
COUNT = Skill("count", "word", "How many letters are in {}?", lambda word: str(len(word)))
NEXT_NUMBER = Skill(
    "next_number",
    "number",
    "What comes after {}?",
    lambda number: str(int(number) + 1),
    lambda number: str(int(number) - 1),
)
SKILLS = (SPELL, CAPITALS, BACKWARDS, REPEAT, LAST_LETTER, COUNT, NEXT_NUMBER)


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
