# SPDX-License-Identifier: Apache-2.0
"""A tiny Llama, and for each question a right and a wrong answer.

Demonstrations come first, half of them wrong; preferences then teach which half.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiny import llama, output, skills
from tiny.options import LlamaDpoOptions
from tiny.skills import Skill
from tiny.words import different_words

NUM_WORDS = 4000

Message = dict[str, str]
Row = dict[str, Any]


@dataclass(frozen=True)
class Mistake:
    """A skill, and the wrong answer to its question."""

    skill: Skill
    answer: Callable[[str], str]


def first_letter(word: str) -> str:
    """Return the first letter of the word."""
    return word[0]


def number_before(number: str) -> str:
    """Return the number before the given one."""
    return str(int(number) - 1)


NOT_IN_CAPITALS = Mistake(skills.CAPITALS, str)
SPELLED_WITH_SPACES = Mistake(skills.SPELL, " ".join)
FIRST_LETTER = Mistake(skills.LAST_LETTER, first_letter)
NUMBER_BEFORE = Mistake(skills.NEXT_NUMBER, number_before)
MISTAKES = (NOT_IN_CAPITALS, SPELLED_WITH_SPACES, FIRST_LETTER, NUMBER_BEFORE)


def make(folder: Path, options: LlamaDpoOptions) -> None:
    """Write the model and the rows; print how to train on them unless quiet."""
    model, tokenizer = llama.make_model(options.of_model())
    with output.writing_to(folder):
        output.save_model(folder / "model", model, tokenizer, f"{len(tokenizer)} tokens")
        output.write_files(folder / "data", make_rows(options), "skill")
    if not options.quiet:
        print_launch(folder)


def make_rows(options: LlamaDpoOptions) -> dict[str, list[Row]]:
    """Return the rows of the files train, test and demonstrations; skills take turns in each.

    No word or number of the test rows is in another file.
    """
    rng = random.Random(options.seed)
    words = list(itertools.islice(words_for_mistakes(rng), NUM_WORDS))
    pools = {"word": words, "number": skills.shuffled_numbers(rng)}
    test = make_pairs(options.num_test_rows, pools, list.pop)
    train = make_pairs(options.num_train_rows, pools, rng.choice)
    pairs = make_pairs(options.num_demonstrations, pools, rng.choice)
    return {"train": train, "test": test, "demonstrations": demonstrate(pairs)}


def words_for_mistakes(rng: random.Random) -> Iterator[str]:
    """Yield words that begin and end with different letters, so that no mistake is right."""
    for word in different_words(rng):
        if word[0] != word[-1]:
            yield word


def make_pairs(
    count: int, pools: dict[str, list[str]], pick: Callable[[list[str]], str]
) -> list[Row]:
    """Return `count` rows; `pick` takes a word and a number from the pools for each."""
    pairs = []
    for mistake in itertools.islice(itertools.cycle(MISTAKES), count):
        items = {kind: pick(pool) for kind, pool in pools.items()}
        pairs.append(make_pair(mistake, items[mistake.skill.about]))
    return pairs


def make_pair(mistake: Mistake, item: str) -> Row:
    """Return a question about a word or a number, with its answer and the mistake."""
    skill = mistake.skill
    right = [{"role": "assistant", "content": skill.answer(item)}]
    wrong = [{"role": "assistant", "content": mistake.answer(item)}]
    return {
        "prompt": [{"role": "user", "content": skill.question.format(item)}],
        "chosen": right,
        "rejected": wrong,
        "completion": right,
        "skill": skill.name,
    }


def demonstrate(pairs: list[Row]) -> list[Row]:
    """Return rows with one completion each: each skill's is right and wrong in turn."""
    demonstrations = []
    for i, pair in enumerate(pairs):
        is_wrong = i // len(MISTAKES) % 2 == 1
        completion = pair["rejected"] if is_wrong else pair["chosen"]
        row = {"prompt": pair["prompt"], "completion": completion, "skill": pair["skill"]}
        demonstrations.append(row)
    return demonstrations


def print_launch(folder: Path) -> None:
    """Print the commands that train on the demonstrations, then on the preferences."""
    first = "--per_device_train_batch_size 64 --learning_rate 3e-3 --warmup_steps 0.05"
    demonstrations = "--dataset_name {data}/demonstrations.jsonl"
    output.print_launch("llama", folder, first, demonstrations, run="base")
    then = "--per_device_train_batch_size 32 --num_train_epochs 1 --learning_rate 1e-4 --beta 1"
    output.print_launch("llama_dpo", folder, then, model="base")
