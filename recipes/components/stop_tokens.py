# SPDX-License-Identifier: Apache-2.0
"""The tokens that end an answer: what a model lists, and what it was trained to end with.

Many base models list only the end of a text in their generation config. A program that serves a
model trained on conversations would then continue past the end of its turn.
"""

from collections.abc import Collection
from typing import Any

from components.chat_template import ANSWER, EXAMPLE, ChatTemplate, without_closing_token


def listed_stop_tokens(generation_config: Any) -> set[int]:
    """Return the tokens that a generation config lists as ends of a text: none, one or several."""
    listed = generation_config.eos_token_id
    if listed is None:
        return set()
    return set(listed) if isinstance(listed, list) else {listed}


def stop_tokens_of_texts(tokenizer: Any) -> set[int]:
    """Return the token that ends a text or a document; none for a tokenizer without one."""
    return set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}


def stop_tokens_of_turns(tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer in a conversation: of the text, and of its turn."""
    ends = stop_tokens_of_texts(tokenizer)
    end = end_of_turn(tokenizer)
    return ends if end is None else ends | {end}


def end_of_turn(tokenizer: Any) -> int | None:
    """Return the token that ends the assistant's turn in the chat template.

    None if no token of its own follows an answer, or if the template takes no conversation of a
    question and an answer.
    """
    template = ChatTemplate(tokenizer)
    try:
        text = template.render(EXAMPLE)
    except Exception:  # Templates raise what they like, for what they do not take
        return None
    _, answer, after = without_closing_token(text, template).rpartition(ANSWER)
    ends = [token for token in template.end_tokens if after.rstrip().endswith(token)]
    if not answer or not ends:
        return None
    return tokenizer.convert_tokens_to_ids(max(ends, key=len))


def add_stop_tokens(model: Any, stop_tokens: Collection[int]) -> list[int] | None:
    """Have the generation config of a model list these tokens too, if it lacks one of them.

    Returns:
        What it lists from then on; None if it is as it was.
    """
    known = listed_stop_tokens(model.generation_config)
    if known.issuperset(stop_tokens):
        return None
    model.generation_config.eos_token_id = sorted(known.union(stop_tokens))
    return model.generation_config.eos_token_id
