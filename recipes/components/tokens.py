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
