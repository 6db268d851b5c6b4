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


def write_skills(folder: Path, files: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Write the rows of each file, and print how many there are of each skill."""
    for name, rows in files.items():
        path = folder / f"{name}.jsonl"
        write_rows(path, rows)
        number_of = Counter(row["skill"] for row in rows)
        print(f"{path}: {len(rows)} rows {counted(number_of)}")


def counted(number_of: Mapping[str, int]) -> str:
    """Return how many there are of each kind, such as `(spell 100, count 100)`."""
    counts = [f"{kind} {number}" for kind, number in number_of.items()]
    return f"({', '.join(counts)})"


def print_launch(recipe: str, lines: Sequence[str]) -> None:
    """Print a command that trains in one process.

    lines: the recipe's flags, as many per line as fit.
    """
    lines = [f"    {line}" for line in lines]
    print(
        f"  accelerate launch --config_file accelerate_configs/single.yaml recipes/{recipe}.py \\"
    )
    print(" \\\n".join(lines))
