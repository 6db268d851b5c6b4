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
    tqdm.write(f"{read} -> {written[:SHOWN_LETTERS]} (should be: {wanted[:SHOWN_LETTERS]})")
