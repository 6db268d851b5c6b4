# SPDX-License-Identifier: Apache-2.0
"""The loss of a trained model on rows that no contestant was trained on."""

from collections.abc import Sequence
from pathlib import Path

from . import recipe
from .cells import Cell, Settings
from .prepare import usual_batch
from .recipe import Batch

NUM_ROWS = 200  # rows of GSM8K's test set
BATCH_SIZE = 8
MAX_LENGTH = 1024


def held_out_batches(cell: Cell, settings: Settings) -> list[Batch]:
    """Return rows that no contestant of a cell was trained on, as batches of `usual_batch`."""
    folder = settings.model_folder(cell.model)
    path = settings.data / "test.jsonl"
    if cell.rows == "words":
        path = folder / "data" / "test.jsonl"
    tokenizer = recipe.load_tokenizer(folder / "model")
    pad = tokenizer.pad_token_id
    lines = path.read_text().splitlines()[:NUM_ROWS]
    tokens = recipe.tokenize(lines, tokenizer, MAX_LENGTH)
    batches = recipe.batches(tokens, pad, BATCH_SIZE, MAX_LENGTH)
    return [usual_batch(batch, pad) for batch in batches]


def held_out_loss(model_folder: Path, batches: Sequence[Batch]) -> float:
    """Return the loss of a saved model, in nats per supervised token."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(model_folder, trust_remote_code=False).eval()
    loss = 0.0
    count = 0
    with torch.no_grad():
        for batch in batches:
            logits = model(**batch["inputs"]).logits[:, :-1].flatten(0, 1).float()
            targets = batch["labels"][:, 1:].flatten()
            loss += cross_entropy(logits, targets, reduction="sum").item()
            count += batch["counts"][0].item()
    return loss / count
