# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks need from the recipes; no other module here imports them.

The recipe is imported when a function is called, since it loads torch.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RECIPE = "recipes/llama.py"

# A row as the recipe tokenizes it: input_ids and labels, -100 for tokens that are not supervised
TokenRow = dict[str, list[int]]
Batch = dict[str, Any]


class Rows(list):
    """Rows as the recipe's collate function reads them from a dataset."""

    def __getitems__(self, numbers: Sequence[int]) -> list[dict[str, Any]]:
        return [self[number] for number in numbers]


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model."""
    from components import chat

    return chat.load_tokenizer(str(folder))


def tokenize(lines: Sequence[str], tokenizer: Any, max_length: int) -> list[TokenRow]:
    """Return rows of text, given as lines of JSON, as the recipe tokenizes them."""
    import llama
    from components.chat_template import ChatTemplate

    template = ChatTemplate(tokenizer)
    rows = [llama.tokenize_row(json.loads(line), template, max_length) for line in lines]
    return [{"input_ids": row["input_ids"], "labels": row["labels"]} for row in rows]


def preparation(words: Sequence[str]) -> Callable[[Path], Any]:
    """Return a function from a .jsonl file to the dataset of its rows as the recipe prepares them.

    words: the recipe's command line, in which the file takes the place of --dataset_name.
    """
    import llama
    from components import chat

    args = parse_words(words)
    tokenizer = chat.load_tokenizer(args.model_name_or_path, chat_template=args.chat_template)

    def prepare(file: Path) -> Any:
        rows, _ = llama.load_data(dataclasses.replace(args, dataset_name=[str(file)]), tokenizer)
        return rows.dataset

    return prepare


def batches(
    tokens: Sequence[TokenRow],
    pad_token_id: int,
    batch_size: int,
    max_length: int,
    packed: bool = False,
) -> list[Batch]:
    """Return rows of tokens as the recipe's batches in its sequential order.

    Each has inputs (arguments of the model), positions and targets ([supervised tokens], see
    components.packing.TokenCollator), and counts (of supervised tokens, and of all but padding).
    """
    from components.batches import Batches
    from components.lines import best_fit
    from components.packing import TokenCollator

    lengths = [len(row["input_ids"]) for row in tokens]
    source = Rows({**row, "row": 0} for row in tokens)
    lines: Sequence[list[int]] = [[row] for row in range(len(tokens))]
    width = 0
    if packed:
        lines = best_fit(lengths, max_length).in_order_of_rows()
        width = max_length
    collate = TokenCollator(pad_token_id=pad_token_id, width=width)
    found = []
    for numbers in Batches(len(lines), batch_size):
        batch = collate(source, [lines[number] for number in numbers])
        names = ("inputs", "positions", "targets", "counts")
        found.append({name: batch[name] for name in names})
    return found


def put_loss_in_head(model: Any, max_logits_mib: float) -> Any:
    """Make a model's output head compute the recipe's loss. Returns components' LossInHead."""
    import torch

    from components.head_loss import LossInHead

    return LossInHead(model, max_logits_mib, torch.device("cpu"))


def parse_words(words: Sequence[str]) -> Any:
    """Return the recipe's arguments from the words of a command line."""
    import llama
    from components.cli import parse_arguments

    return parse_arguments(llama.Arguments, words=words)
