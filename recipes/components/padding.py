# SPDX-License-Identifier: Apache-2.0
"""Texts of different lengths as one batch of an encoder."""

from collections.abc import Mapping, Sequence
from typing import Any


def pad_texts(rows: Sequence[Mapping[str, Any]], tokenizer: Any) -> dict[str, Any]:
    """Return the model's arguments for a batch's rows, [rows, tokens], padded on the right.

    A rank without rows takes part with one token.

    Args:
        rows: with input_ids and token_type_ids, which are empty if the model takes none.
    """
    nothing = {"input_ids": [tokenizer.pad_token_id], "token_type_ids": []}
    texts = []
    for row in rows or [nothing]:
        names = [name for name in ("input_ids", "token_type_ids") if len(row[name])]
        texts.append({name: row[name] for name in names})
    return dict(tokenizer.pad(texts, padding_side="right", return_tensors="pt"))
