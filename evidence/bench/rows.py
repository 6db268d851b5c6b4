# SPDX-License-Identifier: Apache-2.0
"""The rows of a cell, as lines of JSON."""

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

from .cells import Cell, Flags, Settings

CHARACTERS_PER_TOKEN = 6  # more than the average, so that rows are long enough
WORDS = "the quick brown fox jumps over a lazy dog and runs home before it rains".split()


def text_rows(cell: Cell, flags: Flags, count: int, settings: Settings) -> list[str]:
    """Return the first `count` rows of a cell.

    flags: of the contestant; rows that are "long" are longer than its max_length.
    """
    path = source_of(cell, settings)
    if path is None:
        return [json.dumps(row) for row in ragged_rows(count)]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    if cell.rows != "long":
        return [json.dumps(row) for row in rows[:count]]
    texts = itertools.cycle(row.get("answer") or row["prompt"] for row in rows)
    length = flags["max_length"] * CHARACTERS_PER_TOKEN
    lines = []
    for _ in range(count):
        row = {"prompt": "Go on.", "completion": long_text(texts, length)}
        lines.append(json.dumps(row))
    return lines


def source_of(cell: Cell, settings: Settings) -> Path | None:
    """Return the file that a cell's rows are read from, or None if they are generated instead.

    A machine with a GPU may not have the rows of GSM8K.
    """
    gsm8k = settings.data / "train.jsonl"
    beside_model = settings.model_folder(cell.model) / "data" / "train.jsonl"
    if cell.rows == "words" or settings.smoke:
        return beside_model
    if cell.device == "cpu" or gsm8k.is_file():
        return gsm8k
    return None if cell.rows == "gsm8k" else beside_model


def ragged_rows(count: int, seed: int = 0) -> Iterator[dict[str, str]]:
    """Yield rows that replace those of GSM8K: questions and answers of very different lengths.

    Each row has 30 to 500 words.
    """
    draw = random.Random(seed)
    for _ in range(count):
        question = " ".join(draw.choices(WORDS, k=draw.randint(10, 60)))
        number = draw.randint(20, 60) * draw.choice([1, 2, 4, 7])
        answer = " ".join(draw.choices(WORDS, k=number))
        yield {"question": question, "answer": answer}


def long_text(texts: Iterable[str], length: int) -> str:
    """Return texts, joined by spaces, of at least `length` characters."""
    parts = []
    size = 0
    for text in texts:
        parts.append(text)
        size += len(text) + 1
        if size >= length:
            break
    return " ".join(parts)
