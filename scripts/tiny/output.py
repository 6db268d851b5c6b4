# SPDX-License-Identifier: Apache-2.0
"""The folder that a maker writes: model/ and data/."""

import json
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ViTImageProcessorPil
from transformers.utils import logging

from common import Exit, stop

LAUNCH = "accelerate launch --config_file accelerate_configs/single.yaml"
ROWS = "--dataset_name {data}/train.jsonl --eval_dataset_name {data}/test.jsonl"

Processor = PreTrainedTokenizerFast | ViTImageProcessorPil


@contextmanager
def writing_to(folder: Path) -> Generator[None]:
    """End the process with 73 and one line if something cannot be written."""
    logging.disable_progress_bar()
    try:
        yield
    except (OSError, SafetensorError) as error:
        stop(Exit.CANNOT_WRITE, f"cannot write to {folder}: {error}")


def save_model(
    folder: Path, model: PreTrainedModel, processor: Processor, description: str
) -> None:
    """Write a model and its tokenizer or image processor, and print its size and a description."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    size = model.num_parameters()
    print(f"{folder}: {size:,} parameters, {description}")


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write one JSON object per line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def write_files(
    folder: Path, files: Mapping[str, Sequence[dict[str, Any]]], kind: str | None = None
) -> None:
    """Write the rows of each file, and print how many there are: also of each kind, if they say it.

    kind: the column with it.
    """
    for name, rows in files.items():
        path = folder / f"{name}.jsonl"
        write_rows(path, rows)
        counts = ""
        if kind is not None:
            number_of = Counter(row[kind] for row in rows)
            counts = ", ".join(f"{kind} {number}" for kind, number in number_of.items())
        print(f"{path}: {len(rows)} rows{counts and f' ({counts})'}")


def print_launch(
    recipe: str, folder: Path, flags: str, rows: str = ROWS, model: str = "model", run: str = "run"
) -> None:
    """Print a command that trains in one process.

    folder: with model, data/ and run.
    rows: the flags of the data sets, with {data} for the folder of the rows.
    """
    print("Train it with:")
    print(f"  {LAUNCH} recipes/{recipe}.py \\")
    print(f"    --model_name_or_path {folder / model} {rows.format(data=folder / 'data')} \\")
    print(f"    {flags} --output_dir {folder / run}")
