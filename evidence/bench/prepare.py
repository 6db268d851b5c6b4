# SPDX-License-Identifier: Apache-2.0
"""Prepare what contestants read: a model, and its rows in the form of each contestant."""

import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from paths import ROOT

from . import recipe
from .cells import Cell, Contestant, Flags, Settings, slug
from .commands import as_words
from .models import FOR_A_GPU, shape_of
from .recipe import Batch
from .rows import text_rows

MAKER = ("scripts/make_tiny.py", "llama")
ROWS_PER_LINE = 4  # at most, of GSM8K at 512 tokens


class NoModelError(Exception):
    """A model could not be made; the message is the end of the output of make_tiny.py."""


def make_models(names: Iterable[str], settings: Settings) -> None:
    """Write the models that are missing to OUTPUT_DIR/models/NAME, with random weights.

    Raises NoModelError if one cannot be made.
    """
    for name in names:
        folder = settings.model_folder(name)
        if (folder / "model" / "config.json").exists():
            continue
        print(f"makes {folder}", flush=True)
        make_model(folder, maker_flags(name, settings))


def make_model(folder: Path, flags: Flags) -> None:
    """Write a model with random weights, and its tokenizer, to FOLDER/model.

    flags: of scripts/make_tiny.py. Raises NoModelError if it cannot be made.
    """
    command = [sys.executable, *MAKER, folder.resolve(), *as_words(flags)]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise NoModelError(done.stdout[-2000:])


def maker_flags(name: str, settings: Settings) -> Flags:
    """Return the flags of the script that makes a model.

    Its tokenizer is trained on the rows of GSM8K if they are available and the vocabulary is large
    enough.
    """
    flags = dict(shape_of(name, settings.smoke))
    text = settings.data / "train.jsonl"
    if flags["vocab_size"] > 320 and text.is_file() and not settings.smoke:
        flags["text"] = text
    else:
        flags["num_train_rows"] = 9000
        flags["num_test_rows"] = 210
    if name in FOR_A_GPU and not settings.smoke:
        flags["dtype"] = "bfloat16"
        flags["device"] = "cuda"
    return flags


def prepare(cell: Cell, contestant: Contestant, settings: Settings) -> Path:
    """Write the rows of a contestant once, and return their folder.

    It has rows.jsonl (text), tokens.jsonl (input_ids and labels of the recipe), own.pt (the
    recipe's batches) and padded.pt (the same as most loops have them).
    """
    import torch

    flags = cell.flags_of(contestant)
    model = cell.model_of(contestant)
    batch_size = flags["per_device_train_batch_size"]
    packed = flags.get("packing", False)
    count = number_of_rows(cell, contestant, settings)
    name = f"{cell.rows}-{model}-{flags['max_length']}-{count}-{batch_size}"
    if packed:
        name += "-packed"
    folder = settings.output_dir / "data" / slug(name)
    if (folder / "own.pt").exists():
        return folder

    folder.mkdir(parents=True, exist_ok=True)
    lines = text_rows(cell, flags, count, settings)
    (folder / "rows.jsonl").write_text("\n".join(lines) + "\n")
    tokenizer = recipe.load_tokenizer(settings.model_folder(model) / "model")
    pad = tokenizer.pad_token_id
    tokens = recipe.tokenize(lines, tokenizer, flags["max_length"])
    (folder / "tokens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tokens))
    own = recipe.batches(tokens, pad, batch_size, flags["max_length"], packed)
    torch.save([usual_batch(batch, pad) for batch in own], folder / "padded.pt")
    torch.save(own, folder / "own.pt")
    return folder


def number_of_rows(cell: Cell, contestant: Contestant, settings: Settings) -> int:
    """Return how many rows a contestant reads: those of the cell, or as many as its steps need."""
    if cell.num_rows:
        return cell.num_rows
    flags = cell.flags_of(contestant)
    lines = flags["per_device_train_batch_size"] * contestant.ranks
    lines *= flags.get("gradient_accumulation_steps", 1)
    lines *= settings.warmup + cell.steps
    return lines * ROWS_PER_LINE if flags.get("packing", False) else lines


def usual_batch(own: Batch, pad_token_id: int) -> Batch:
    """Return one of the recipe's batches as most loops have it.

    Labels have the shape of the tokens, [rows, tokens]. Unless rows are packed, there is a padding
    mask; without a mask, transformers separates packed rows by their positions.
    """
    import torch

    inputs = dict(own["inputs"])
    ids = inputs["input_ids"]
    labels = torch.full(ids.shape, -100)
    labels.view(-1)[own["positions"] + 1] = own["targets"]
    if "position_ids" not in inputs:
        inputs["attention_mask"] = (ids != pad_token_id).long()
    return {"inputs": inputs, "labels": labels, "counts": own["counts"]}
