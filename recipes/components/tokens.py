# SPDX-License-Identifier: Apache-2.0
"""Texts as tokens: a model's tokenizer, and the chat template that it has."""

from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from components.loading import loading
from core.chat import DEFAULT_TEMPLATE
from core.exits import Exit, fail


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


def load_tokenizer(name: str, revision: str = "main", chat_template: str | None = None) -> Any:
    """Return the tokenizer of a folder or hub id, with a chat template and a pad token.

    Ends with 64 if there is none, and with 69 if the hub cannot be reached.

    Args:
        revision: branch, tag or commit on the hub.
        chat_template: file with the chat template to use in place of the tokenizer's own.
    """
    tokenizer = load_text_tokenizer(name, revision)
    place = f"{name}: the tokenizer's chat template"
    if chat_template is not None:
        place = f"--chat_template {chat_template}"
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            fail(Exit.USAGE, f"{place}: {error}")
    if not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_TEMPLATE
    check_template(tokenizer.chat_template, place)
    return tokenizer


def check_template(templates: str | dict[str, str], place: str) -> None:
    """End with 64 if a chat template is not valid Jinja.

    Args:
        templates: one, or {name: template}.
        place: where it is from.
    """
    if isinstance(templates, str):
        templates = {"default": templates}
    for template in templates.values():
        try:
            render_jinja_template([], chat_template=template)
        except TemplateError as error:
            line = getattr(error, "lineno", 1)
            fail(Exit.USAGE, f"{place}, line {line}: is not valid Jinja: {error}")


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
