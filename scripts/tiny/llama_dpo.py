# SPDX-License-Identifier: Apache-2.0
"""A Llama, and pairs of a right and a wrong answer.

FOLDER/data has train.jsonl and test.jsonl, rows of {"prompt", "chosen", "rejected", "completion",
"skill"}: each skill has one typical mistake, such as a word that is not written in capitals. Of the
completions in demonstrations.jsonl half are mistakes: a model that recipes/llama.py trains on them
makes the mistake half of the time, and preferences then teach it not to.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

from tiny import llama
from tiny.maker import Row, different_words

NUM_WORDS = 4000
NUM_DEMONSTRATIONS = 12000
SKILLS = (llama.CAPITALS, llama.SPELL, llama.LAST_LETTER, llama.NEXT_NUMBER)
MAKER = replace(llama.MAKER, num_rows=(4000, 400))


def make_rows(num_train_rows: int, num_test_rows: int, seed: int) -> dict[str, list[Row]]:
    """Return the rows of the files train, test and demonstrations; skills take turns in each.

    No word or number of the test rows is in another file.
    """
    rng = random.Random(seed)
    # Words that begin and end with different letters, so that no mistake is right
    words = (word for word in different_words(rng) if word[0] != word[-1])
    pools = {
        "word": list(itertools.islice(words, NUM_WORDS)),
        "number": llama.shuffled_numbers(rng),
    }
    test = make_pairs(num_test_rows, pools, list.pop)
    train = make_pairs(num_train_rows, pools, rng.choice)
    demonstrations = []
    for i, pair in enumerate(make_pairs(NUM_DEMONSTRATIONS, pools, rng.choice)):
        is_wrong = i // len(SKILLS) % 2 == 1  # each skill's is right and wrong in turn
        completion = pair["rejected"] if is_wrong else pair["chosen"]
        row = {"prompt": pair["prompt"], "completion": completion, "skill": pair["skill"]}
        demonstrations.append(row)
    return {"train": train, "test": test, "demonstrations": demonstrations}


def make_pairs(
    count: int, pools: dict[str, list[str]], pick: Callable[[list[str]], str]
) -> list[Row]:
    """Return `count` rows: a question about a word or a number, its answer and the mistake.

    Args:
        pick: takes a word and a number from the pools for each row.
    """
    pairs = []
    for skill in itertools.islice(itertools.cycle(SKILLS), count):
        items = {kind: pick(pool) for kind, pool in pools.items()}
        item = items[skill.about]
        right = said("assistant", skill.answer(item))
        row: Row = {"prompt": said("user", skill.question.format(item)), "chosen": right}
        row["rejected"] = said("assistant", skill.mistake(item))
        row |= {"completion": right, "skill": skill.name}
        pairs.append(row)
    return pairs


def said(role: str, text: str) -> list[dict[str, str]]:
    """Return a conversation of one message."""
    return [{"role": role, "content": text}]
