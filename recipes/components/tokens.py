# SPDX-License-Identifier: Apache-2.0
"""Texts as tokens: a model's tokenizer, and the label of a token that is not trained on."""

from typing import Any

import transformers

from components.loading import loading

NOT_TRAINED_ON = -100  # the label that torch's cross_entropy ignores


def load_text_tokenizer(name: str, revision: str = "main", **options: Any) -> Any:
    """Return the tokenizer of a folder or hub id, with a pad token.

    Ends with 64 if there is none, and with 69 if the hub cannot be reached.

    Args:
        revision: branch, tag or commit on the hub.
        options: further arguments of from_pretrained, such as src_lang.
    """
    with loading("tokenizer", name):
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
            name, revision=revision, trust_remote_code=False, **options
        )
    if not tokenizer.pad_token:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


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
