# SPDX-License-Identifier: Apache-2.0
"""Texts that a model has generated for evaluation rows: kept in a file, and some of them shown."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

NUM_SHOWN = 3
SHOWN_LETTERS = 200


def write_predictions(predictions: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a file with one JSON object per row."""
    with open(path, "w", encoding="utf-8") as file:
        for prediction in predictions:
            file.write(json.dumps(prediction, ensure_ascii=False) + "\n")


def show_prediction(read: str, written: str, wanted: str) -> None:
    """Print above the progress bar, on one line, what was read, written and wanted."""
    wanted = on_one_line(wanted[:SHOWN_LETTERS])
    written = on_one_line(written[:SHOWN_LETTERS])
    tqdm.write(f"{on_one_line(read)} -> {written} (should be: {wanted})")


def on_one_line(text: str) -> str:
    """Return a text with blanks for white space, and without what could control a terminal."""
    words = " ".join(text.split())
    return "".join(letter for letter in words if letter.isprintable())
