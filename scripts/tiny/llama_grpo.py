# SPDX-License-Identifier: Apache-2.0
"""A Llama, and questions whose answers a program can check.

FOLDER/data has train.jsonl and test.jsonl, rows of {"question", "answer"} about numbers, none of
which is in both, and demonstrations.jsonl: the former again, every second one with a mistake. A
model that has learned from these gives right answers and wrong ones, of which a reward tells it
the right ones.
"""

import random
from collections.abc import Callable
from dataclasses import replace

from tiny import llama
from tiny.maker import Row

NUM_DEMONSTRATIONS = 6000
MAKER = replace(llama.MAKER, num_rows=(900, 99), columns=("question", "answer"))


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train, test and demonstrations."""
    rng = random.Random(seed)
    skill = llama.NEXT_NUMBER
    numbers = llama.shuffled_numbers(rng)[: num_train_rows + num_test_rows]
    train = [make_row(skill.answer, number) for number in numbers[:num_train_rows]]
    test = [make_row(skill.answer, number) for number in numbers[num_train_rows:]]
    demonstrations = []
    for place in range(NUM_DEMONSTRATIONS):
        said = skill.mistake if place % 2 else skill.answer
        demonstrations.append(make_row(said, rng.choice(numbers[:num_train_rows])))
    return {"train": train, "test": test, "demonstrations": demonstrations}


def make_row(said: Callable[[str], str], number: str) -> Row:
    """Return a question about a number, and what is said in answer to it."""
    return {"question": llama.NEXT_NUMBER.question.format(number), "answer": said(number)}
