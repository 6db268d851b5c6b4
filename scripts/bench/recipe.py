"""What the benchmarks take from recipes/llama.py, and nothing else of the recipes.

The recipe is imported when a function is called: it loads torch.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

RECIPE = "recipes/llama.py"

# A row as the recipe tokenizes it: input_ids and labels, -100 where nothing is trained on
TokenRow = dict[str, list[int]]
Batch = dict[str, Any]


class Rows(list):
    """Rows as the recipe's collate function reads them from a data set."""

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [self[number] for number in numbers]


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model."""
    import llama

    return llama.load_tokenizer(str(folder))


def tokenize(lines: Sequence[str], tokenizer: Any, max_length: int) -> list[TokenRow]:
    """Return rows of text, given as lines of JSON, as the recipe tokenizes them."""
    import llama

    rows = [llama.tokenize_row(json.loads(line), tokenizer, max_length) for line in lines]
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]


def batches(
    tokens: Sequence[TokenRow],
    pad_token_id: int,
    batch_size: int,
    max_length: int,
    packed: bool = False,
) -> list[Batch]:
    """Return rows of tokens as the recipe's batches in its sequential order.

    Each has inputs (arguments of the model), positions and targets ([supervised tokens], see
    `collate` of the recipe), and counts (of supervised tokens, and of all without padding).
    """
    import llama

    lengths = [len(row["input_ids"]) for row in tokens]
    source = Rows({**row, "row": 0} for row in tokens)
    lines = [[row] for row in range(len(tokens))]
    width = 0
    if packed:
        lines = sorted(llama.best_fit(lengths, max_length), key=min)
        width = max_length
    found = []
    for numbers in llama.global_batches(len(lines), batch_size, 1):
        of_batch = [lines[number] for number in numbers]
        batch = llama.collate(source, of_batch, pad_token_id, width)
        supervised = batch["supervised"]
        found.append({"inputs": batch["inputs"], **supervised, "counts": batch["counts"]})
    return found


def put_loss_in_head(model: Any, max_logits_mib: float, positions: Any, targets: Any) -> None:
    """Make a model's output head return the recipe's loss instead of logits.

    positions, targets: [supervised tokens], of the batch that is to come, as the recipe's loss
    finds them.
    """
    import llama

    llama.loss_in_head(model, max_logits_mib)
    llama.SUPERVISED.update(positions=positions, targets=targets)


def parse_words(words: Sequence[str]) -> argparse.Namespace:
    """Return the recipe's arguments of a command line, as the recipe reads them.

    The recipe reads sys.argv, so that is what this sets while it does.
    """
    import llama

    with mock.patch.object(sys, "argv", [RECIPE, *words]):
        return llama.parse_args()
