# SPDX-License-Identifier: Apache-2.0
"""Texts that a model has generated for evaluation rows: kept in a file, and some of them shown."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

NUM_SHOWN = 3
SHOWN_LETTERS = 200


def write_predictions(predictions: Sequence[Mapping[str, Any]], output_dir: str) -> None:
    """Write predictions.jsonl, one line per row, and print the first ones above the progress bar.

    Args:
        predictions: for each row its number in the file, "row", and the texts "source",
            "prediction" and "target".
    """
    with open(Path(output_dir, "predictions.jsonl"), "w", encoding="utf-8") as file:
        for prediction in predictions:
            file.write(json.dumps(prediction, ensure_ascii=False) + "\n")
    for prediction in predictions[:NUM_SHOWN]:
        source = prediction["source"][:SHOWN_LETTERS]
        text = prediction["prediction"][:SHOWN_LETTERS]
        target = prediction["target"][:SHOWN_LETTERS]
        tqdm.write(f"{source} -> {text} (should be: {target})")
