# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, of which only those of the assistant are trained on."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from components.conversations import Message
from components.rows import hash_of_row
from components.tokens import NOT_TRAINED_ON, load_text_tokenizer, without_lone_surrogates

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


def load_tokenizer(name: str, revision: str = "main") -> Any:
    """Return the tokenizer of a folder or hub id, with a chat template and a pad token.

    Ends with 64 if there is none, and with 69 if the hub cannot be reached.

    Args:
        revision: branch, tag or commit on the hub.
    """
    tokenizer = load_text_tokenizer(name, revision)
    if not tokenizer.chat_template:
        tokenizer.chat_template = DEFAULT_CHAT_TEMPLATE
    return tokenizer


def tokenize_conversation(
    messages: Sequence[Message], tokenizer: Any, max_length: int, answers_only: bool = True
) -> dict[str, Any]:
    """Return the tokens of a conversation and their labels.

    The assistant's tokens are trained on, including its end of turn. They are found by their place
    in the text and not by their id, since the end of turn may also be the pad token
    (huggingface/trl#976).

    Args:
        messages: a validated conversation, so that there is an answer.
        answers_only: whether only the assistant's tokens are trained on, or all of them.

    Returns:
        input_ids and labels (-100: not trained on), at most max_length of each; truncated, whether
        the end is missing; length, largest id and hash of the tokens.

    Raises:
        ValueError: if nothing is left to train on.
    """
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    is_trained_on = np.zeros(len(text) + 1, dtype=bool)  # one entry per character
    for start, end in assistant_spans(messages, text, tokenizer):
        is_trained_on[start:end] = True
    text, is_trained_on = close_last_turn(text, is_trained_on, tokenizer)
    if not answers_only:
        is_trained_on[:] = True
    encoded = tokenizer(
        without_lone_surrogates(text), add_special_tokens=False, return_offsets_mapping=True
    )
    labels = []
    for token, (start, _) in zip(encoded["input_ids"], encoded["offset_mapping"], strict=True):
        labels.append(token if is_trained_on[start] else NOT_TRAINED_ON)
    first = first_trained_on(labels)
    if first is None:
        raise ValueError("has no answer in the text that the chat template makes of it")
    if first >= max_length:
        raise ValueError(
            f"has no answer within --max_length {max_length}: {first} tokens are prompt"
        )
    tokens = np.array(encoded["input_ids"][:max_length], dtype=np.int32)
    return {
        "input_ids": tokens.tolist(),
        "labels": labels[:max_length],
        "truncated": len(labels) > max_length,
        "length": len(tokens),
        "largest": int(tokens.max()),
        "hash": hash_of_row(tokens.tobytes()),
    }


def assistant_spans(
    messages: Sequence[Message], text: str, tokenizer: Any
) -> list[tuple[int, int]]:
    """Return the (start, end) of each of the assistant's turns in the text of a conversation.

    A turn is what the conversation up to and including it has beyond the prompt before it. If the
    template rewrites earlier turns, this is not in the text, and the turn is not trained on.
    """
    spans = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(
            messages[:place], tokenize=False, add_generation_prompt=True
        )
        after = text
        if place + 1 < len(messages):
            after = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
        after = after.rstrip()
        is_in_text = text.startswith(before) and text.startswith(after)
        if is_in_text and len(after) > len(before):
            spans.append((len(before), len(after)))
    return spans


def close_last_turn(text: str, is_trained_on: np.ndarray, tokenizer: Any) -> tuple[str, np.ndarray]:
    """Append the end-of-sequence token, trained on, if the template leaves the last turn open.

    The turn is open if the assistant's text ends without a special token. A model that is trained
    on such turns does not learn to stop.
    """
    end = len(text.rstrip())
    has_end_of_turn = text[:end].endswith(tuple(tokenizer.get_added_vocab()))
    if not is_trained_on[end - 1] or has_end_of_turn:
        return text, is_trained_on
    ending = np.ones(len(tokenizer.eos_token) + 1, dtype=bool)
    return text[:end] + tokenizer.eos_token, np.concatenate([is_trained_on[:end], ending])


def first_trained_on(labels: Sequence[int]) -> int | None:
    """Return the index of the first token that is trained on; token 0 is never predicted."""
    for place, label in enumerate(labels):
        if place > 0 and label != NOT_TRAINED_ON:
            return place
    return None


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
    return "".join(texts)
