# SPDX-License-Identifier: Apache-2.0
"""Sources and targets of encoder-decoder models: their tokens, and batches of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from core.batches import Line, rows_of_lines
from core.data import IGNORED
from core.workarounds import workaround


def cut_tokens(tokenizer: Any, max_length: int, **text: str) -> tuple[list[int], bool]:
    """Return at most max_length tokens, eos among them, and whether some were cut off.

    Args:
        text: text=... for a source, text_target=... for a target.
    """
    tokens = tokenizer(**text, truncation=True, max_length=max_length)["input_ids"]
    was_cut = False
    if len(tokens) == max_length:
        was_cut = len(tokenizer(**text, verbose=False)["input_ids"]) > max_length
    eos = tokenizer.eos_token_id
    if eos is not None and eos not in tokens:  # The tokenizers of decoders add none.
        tokens = [*tokens[: max_length - 1], eos]
    return tokens, was_cut


@dataclass(frozen=True)
class Seq2SeqCollator:
    """Make a batch of sources and targets, padded on the right.

    A batch has:
        inputs: input_ids and attention_mask, [rows, source tokens].
        labels: [rows, target tokens], -100 where padded.
        counts: the number of target tokens, and of tokens of both sides without padding.
        row: the numbers of the rows in their file, from 1, on the host.
    """

    columns: ClassVar[list[str]] = ["input_ids", "labels", "row"]
    pad_token_id: int

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the rows of `source` whose numbers are in `lines`, which may be []."""
        rows = rows_of_lines(source, lines)
        # A rank without rows takes part with one token.
        nothing = {"input_ids": [self.pad_token_id], "labels": [IGNORED]}
        pairs = rows or [nothing]
        ids = [torch.tensor(pair["input_ids"]) for pair in pairs]
        masks = [torch.ones_like(tokens) for tokens in ids]
        labels = [torch.tensor(pair["labels"]) for pair in pairs]
        num_targets = sum(len(row["labels"]) for row in rows)
        num_sources = sum(len(row["input_ids"]) for row in rows)
        return {
            "inputs": {
                "input_ids": pad_sequence(ids, batch_first=True, padding_value=self.pad_token_id),
                "attention_mask": pad_sequence(masks, batch_first=True),
            },
            "labels": pad_sequence(labels, batch_first=True, padding_value=IGNORED),
            "counts": torch.tensor([num_targets, num_targets + num_sources]),
            "row": [int(row["row"]) for row in rows],
        }


@workaround("transformers/models/bart/modeling_bart.py, layerdrop", seen="transformers 5.23")
def turn_off_layerdrop(model: torch.nn.Module) -> None:
    """Turn off layerdrop: if one rank skipped a layer, the others would wait for it forever."""
    for module in model.modules():
        # pyrefly: ignore[bad-argument-type]  # torch annotates attributes as modules or tensors
        module.layerdrop = 0.0


@workaround(
    "torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _validate_no_duplicate_params",
    seen="torch 2.13",
)
def share_embedding_modules(model: Any) -> None:
    """Give encoder and decoder one embedding module: FSDP2 requires each weight in one module."""
    shared = model.get_input_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is type(shared) and child.weight is shared.weight:
                setattr(module, name, shared)
