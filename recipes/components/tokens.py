# SPDX-License-Identifier: Apache-2.0
"""Texts as tokens."""

from typing import Any


def without_lone_surrogates(text: str) -> str:
    """Return a text unchanged, or raise the UnicodeEncodeError that locates a lone surrogate."""
    return text.encode().decode()


def tokenize_text(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a text, with what the tokenizer puts before it, once.

    Some also append an end (add_eos_token): a prompt would be over, and an answer would have two.
    """
    encoded = tokenizer(text, verbose=False, return_special_tokens_mask=True)
    tokens, is_added = encoded["input_ids"], encoded["special_tokens_mask"]
    if 0 not in is_added:  # There is no text.
        return [token for token in tokens[:1] if token == tokenizer.bos_token_id]
    start = is_added.index(0)
    end = len(tokens) - is_added[::-1].index(0)
    if tokens[:start] == tokens[start : 2 * start]:  # The text has them too.
        return tokens[start:end]
    return tokens[:end]
