# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, of which only those of the assistant are trained on."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from components.bad_rows import explain_cause
from components.chat_template import (
    EXAMPLE,
    ChatTemplate,
    Span,
    check_nothing_is_lost,
    check_other_keys,
    find_answers,
    fit_arguments,
)
from components.columns import Row
from components.conversations import Conversation
from components.exits import Exit
from components.messages import name_message
from components.rows import hash_of_row
from components.status import fail
from components.tokens import load_text_tokenizer, without_lone_surrogates
from core.batches import NOT_TRAINED_ON

LIKE_A_TOKEN = re.compile(r"<[^<>\s]+>|\[[^\[\]\s]+\]")  # such as <|im_end|> and [INST]
# For tokenizers without a template of their own
DEFAULT_CHAT_TEMPLATE = (
    "{{ bos_token or '' }}"
    "{% for m in messages %}"
    "{{ '<|' + m.role + '|>\n' + m.content }}"
    "{{ eos_token if m.role == 'assistant' }}"
    "{{ '\n' }}"
    "{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt }}"
)


def load_tokenizer(name: str, revision: str = "main", chat_template: str | None = None) -> Any:
    """Return the tokenizer of a folder or hub id, with a chat template and a pad token.

    Ends with 64 if there is none, and with 69 if the hub cannot be reached.

    Args:
        revision: branch, tag or commit on the hub.
        chat_template: file with the chat template to use in place of the tokenizer's own.
    """
    tokenizer = load_text_tokenizer(name, revision)
    if chat_template is not None:
        tokenizer.chat_template = read_chat_template(Path(chat_template))
    if not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    check_own_template(tokenizer, name)
    return tokenizer


def check_own_template(tokenizer: Any, name: str) -> None:
    """End with 64 if the chat template of a tokenizer is not valid Jinja.

    Args:
        name: its folder or hub id.
    """
    templates = tokenizer.chat_template
    if isinstance(templates, str):
        templates = {"default": templates}
    for template in templates.values():
        try:
            render_jinja_template([], chat_template=template)
        except TemplateError as error:
            line = getattr(error, "lineno", 1)
            fail(
                Exit.USAGE,
                f"{name}: the tokenizer's chat template is not valid Jinja: line {line}: {error}: "
                "pass a valid one as --chat_template FILE",
            )


def read_chat_template(path: Path) -> str:
    """Return the chat template in a file; end with 64 if it cannot be read or is no template."""
    try:
        template = path.read_text(encoding="utf-8")
        render_jinja_template([], chat_template=template)
    except (OSError, UnicodeDecodeError) as error:
        fail(Exit.USAGE, f"--chat_template {path}: {explain_cause(error, str(path))}")
    except TemplateError as error:
        line = getattr(error, "lineno", 1)
        fail(Exit.USAGE, f"--chat_template {path}, line {line}: {error}")
    return template


def tokenize_conversation(
    row: Row,
    conversation: Conversation,
    template: ChatTemplate,
    max_length: int,
    answers_only: bool = True,
) -> dict[str, Any]:
    """Return the tokens of a conversation and their labels.

    The assistant's tokens are trained on, including its end of turn. They are found by their offset
    in the text and not by their id, since the end of turn may also be the pad token
    (huggingface/trl#976).

    Args:
        row: where the conversation is from, in which keys that the template drops are noted.
        conversation: with an answer to train on.
        answers_only: whether only the assistant's tokens are trained on, or all of them.

    Returns:
        input_ids and labels (-100: not trained on), at most max_length of each; truncated, whether
        the end is missing; whole_length, the number of tokens with that end; rewritten, the number
        of the assistant's turns that are not trained on, since the template writes them differently
        once the conversation has moved on; length, largest id and hash of the tokens.

    Raises:
        ValueError: if nothing is left to train on, or the template drops what was said.
    """
    conversation = fit_arguments(conversation, template)
    text, spans, left_out = find_answers(conversation, template)
    check_nothing_is_lost(conversation, text, left_out, template)
    check_other_keys(row, conversation, text, template)
    text, spans = close_last_turn(text, spans, template)
    if not answers_only:
        spans = [(0, len(text))]
        left_out = []
    encoded = template.encode(without_lone_surrogates(text))
    tokens = encoded.ids
    labels = [NOT_TRAINED_ON] * len(tokens)
    for start, end in spans:
        inside = slice(first_token_from(start, encoded, text), first_token_from(end, encoded, text))
        labels[inside] = tokens[inside]
    first = first_trained_on(labels)
    if first is None:
        raise ValueError(explain_no_answer(conversation, left_out))
    if first >= max_length:
        raise ValueError(
            f"has no answer within --max_length {max_length}: {first} tokens are prompt"
        )
    kept = np.array(tokens[:max_length], dtype=np.int32)
    return {
        "input_ids": tokens[:max_length],
        "labels": labels[:max_length],
        "truncated": len(tokens) > max_length,
        "whole_length": len(tokens),
        "rewritten": len(left_out),
        "length": len(kept),
        "largest": int(kept.max()),
        "hash": hash_of_row(kept.tobytes()),
    }


def explain_no_answer(conversation: Conversation, left_out: Sequence[int]) -> str:
    """Return why a row has nothing to train on, and what to do about it.

    Args:
        left_out: indices of the messages that the template rewrites.
    """
    problem = "has no answer in the text that the chat template makes of it"
    if not left_out:
        return problem
    index = left_out[-1]
    return (
        f"{problem}: {name_message(conversation.messages[index], index + 1)} does not follow from "
        "the prompt that generation would use; pass another --chat_template, or "
        "--chat_template_kwargs such as '{\"enable_thinking\": false}'"
    )


def close_last_turn(
    text: str, spans: Sequence[Span], template: ChatTemplate
) -> tuple[str, Sequence[Span]]:
    """Append the end-of-sequence token, trained on, if the template leaves the last turn open.

    The turn is open if the assistant's text ends without a special token. A model that is trained
    on such turns does not learn to stop.
    """
    end = len(text.rstrip())
    has_end_of_turn = text[:end].endswith(template.end_tokens)
    if not spans or spans[-1][1] < end or has_end_of_turn:
        return text, spans
    eos_token = template.tokenizer.eos_token
    if eos_token is None:
        raise ValueError(
            "has an answer without an end: the chat template writes none, and the tokenizer has no "
            "eos_token: set it in tokenizer_config.json, or pass another --chat_template"
        )
    closed = text[:end] + eos_token
    start, _ = spans[-1]
    return closed, [*spans[:-1], (start, len(closed))]


def first_token_from(offset: int, encoded: Any, text: str) -> int:
    """Return the index of the first token that begins at an offset in the text, or after it.

    Args:
        encoded: the tokens of the text, a tokenizers.Encoding.
    """
    while offset < len(text):
        token = encoded.char_to_token(offset)
        if token is None:  # a character that the tokenizer has dropped
            offset += 1
            continue
        start, end = encoded.token_to_chars(token)
        if start >= offset:
            return token
        offset = end  # the token began earlier
    return len(encoded)


def first_trained_on(labels: Sequence[int]) -> int | None:
    """Return the index of the first token that is trained on; token 0 is never predicted."""
    for token_index in range(1, len(labels)):
        if labels[token_index] != NOT_TRAINED_ON:
            return token_index
    return None


def name_false_marks(tokenizer: Any) -> str:
    """Return a line on the marks of a chat template that are no tokens, if one ends an answer."""
    template = ChatTemplate(tokenizer)
    _, end = template.around_answer
    known = tokenizer.get_vocab()
    if not end or end in known:
        return ""
    written = [*LIKE_A_TOKEN.findall(template.render(EXAMPLE)), end]
    marks = dict.fromkeys(mark for mark in written if mark not in known)
    return f"\n{', '.join(marks)} of the chat template are no tokens of this tokenizer"


def show_trained_tokens(row: Mapping[str, Any], tokenizer: Any) -> str:
    """Return the text of a row, with the parts that are trained on in [[ ]]."""
    parts: list[tuple[bool, list[int]]] = []
    for token, label in zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True):
        is_trained_on = label != NOT_TRAINED_ON
        if not parts or parts[-1][0] != is_trained_on:
            parts.append((is_trained_on, []))
        parts[-1][1].append(token)
    texts = []
    for is_trained_on, tokens in parts:
        text = tokenizer.decode(tokens)
        texts.append(f"[[{text}]]" if is_trained_on else text)
    return "".join(texts) + name_false_marks(tokenizer)
