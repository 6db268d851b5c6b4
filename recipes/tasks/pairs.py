# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers to one prompt for preference tuning: their tokens, and batches of them."""

import contextlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import concatenate_datasets
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from core.batches import Line, ends_of_rows, rows_of_lines
from core.chat import (
    ChatTemplate,
    Conversation,
    Message,
    check_nothing_is_lost,
    check_roles,
    close_last_turn,
    fit_arguments,
    read_message,
    says_something,
)
from core.data import Row, Rows, hash_of_row, missing_columns, tokenize_text
from core.workarounds import workaround

BETWEEN_PARTS = -1  # In the hash of a pair, between its parts: no token has this number.


# ---- Rows ----
def read_pair(row: Row) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a row if they can be compared.

    Both answers are texts, or both are lists of messages, which are normalized. Either the prompt
    is of the same kind, or both answers begin with it. In that case the returned prompt is None, or
    a text to be ignored.
    """
    prompt = row.get("prompt")
    chosen: Any = row.get("chosen")
    rejected: Any = row.get("rejected")
    are_texts = isinstance(chosen, str) and isinstance(rejected, str)
    are_lists = isinstance(chosen, list) and isinstance(rejected, list)
    if not are_lists and not (are_texts and not isinstance(prompt, list)):
        needed = (
            "chosen and rejected, both texts or both lists of messages, and prompt, of the same "
            "kind, unless they begin with it"
        )
        raise ValueError(missing_columns(row, needed, "prompt", "chosen", "rejected"))
    if are_texts:
        for name, answer in (("chosen", chosen), ("rejected", rejected)):
            if not answer.strip():
                raise ValueError(f"has no text in {name}")
        return prompt, chosen, rejected
    asked = []
    if isinstance(prompt, list):
        asked = read_turns(prompt, first=1)
        prompt = asked
    return prompt, read_answer(asked, chosen, "chosen"), read_answer(asked, rejected, "rejected")


def read_answer(asked: list[Message], answer: Sequence[Any], name: str) -> list[Message]:
    """Return the normalized messages of an answer that is a conversation with those before it.

    Args:
        asked: the messages of the prompt, normalized.
        name: of its column.
    """
    messages = read_turns(answer, first=len(asked) + 1)
    if not messages or not says_something(messages[-1]):
        raise ValueError(f"has no text in {name}")
    check_roles(asked + messages)
    return messages


def read_turns(messages: Sequence[Any], first: int) -> list[Message]:
    """Return messages of a pair, normalized; none of the assistant's can be left out of the loss.

    Args:
        first: the number of the first of them in the conversation.
    """
    read = []
    for number, given in enumerate(messages, first):
        message, weight = read_message(given, number)
        by_assistant = message["role"] == "assistant"
        if by_assistant and weight is False:
            raise ValueError(
                f"message {number} has weight 0, but answers are compared as a whole: remove it"
            )
        if by_assistant and not says_something(message):
            raise ValueError(f"message {number} is empty: the model would learn to say nothing")
        read.append(message)
    return read


def split_shared_prompt(chosen: Any, rejected: Any) -> tuple[Any, Any, Any]:
    """Return the prompt with which both answers begin, and what each answer adds to it.

    The prompt ends where the answers differ, or earlier, so that each keeps at least one message
    or character.

    Args:
        chosen, rejected: both texts, or both lists of messages.
    """
    end = min(shared_length(chosen, rejected), len(chosen) - 1, len(rejected) - 1)
    if chosen[end - 1 : end] == " ":  # Most tokenizers put a space into the token after it.
        end -= 1
    return chosen[:end], chosen[end:], rejected[end:]


def shared_length(*sequences: Sequence[Any]) -> int:
    """Return how many items at their beginning the sequences have in common."""
    for token_index, items in enumerate(zip(*sequences, strict=False)):
        if any(item != items[0] for item in items):
            return token_index
    return min(len(items) for items in sequences)


def tokenize_text_pair(
    prompt: str, chosen: str, rejected: str, tokenizer: Any, max_length: int
) -> dict[str, Any]:
    """Return the tokens of a prompt and of both answers, which are texts.

    Args:
        max_length: the most tokens of a prompt with an answer; longer ones lose their end.

    Raises:
        ValueError: if nothing is left to compare.
    """
    end = tokenizer.eos_token
    texts = [prompt]
    for answer in (chosen, rejected):
        texts.append(prompt + answer.removesuffix(end) + end)  # The end-of-turn text is there once.
    return split_pair([tokenize_text(text, tokenizer) for text in texts], max_length)


def tokenize_message_pair(
    row: Row,
    prompt: list[Message],
    chosen: list[Message],
    rejected: list[Message],
    tools: list[dict[str, Any]],
    template: ChatTemplate,
    max_length: int,
) -> dict[str, Any]:
    """Return the tokens of a prompt, up to where an answer begins, and of both answers.

    Args:
        row: where the messages are from, in which keys that the template drops are noted.
        prompt, chosen, rejected: normalized messages.
        max_length: as in `tokenize_text_pair`.

    Raises:
        ValueError: if nothing is left to compare, or the template drops what was said.
    """
    asked = fit_arguments(Conversation(prompt, tools), template)
    texts = [template.render(asked, add_generation_prompt=True)]
    for answer in (chosen, rejected):
        messages = prompt + answer
        by_assistant = [message["role"] == "assistant" for message in messages]
        conversation = fit_arguments(Conversation(messages, tools, by_assistant), template)
        text = template.render(conversation)
        # Templates may drop the reasoning of all messages but the last
        check_nothing_is_lost(row, conversation, text, template, range(len(messages) - 1))
        texts.append(close_last_turn(text, template))
    tokenizer = template.tokenizer
    encoded = []
    for text in texts:
        tokens = tokenizer(text, add_special_tokens=False, verbose=False)
        encoded.append(tokens["input_ids"])
    return split_pair(encoded, max_length)


def split_pair(whole: Sequence[list[int]], max_length: int) -> dict[str, Any]:
    """Return the tokens of a prompt and of what each answer adds to it.

    Args:
        whole: tokens of the prompt, of it with the chosen and of it with the rejected answer, as
            TRL's DPOTrainer makes them.
    """
    # Tokens of prompt and answer may merge, and templates may rewrite the end of a prompt.
    start = shared_length(*whole)
    prompt_ids = whole[0][:start]
    chosen_ids, rejected_ids = (ids[start:max_length] for ids in whole[1:])
    if not (prompt_ids and chosen_ids and rejected_ids) or chosen_ids == rejected_ids:
        raise ValueError(
            "has no prompt, or no two different answers to it within --max_length "
            f"{max_length}: {start} tokens are prompt"
        )
    longest = max(len(ids) for ids in whole)
    parts = [*prompt_ids, BETWEEN_PARTS, *chosen_ids, BETWEEN_PARTS, *rejected_ids]
    return {
        "prompt_ids": prompt_ids,
        "chosen_ids": chosen_ids,
        "rejected_ids": rejected_ids,
        "length": min(longest, max_length),
        "truncated": longest > max_length,
        "largest": max(max(ids) for ids in whole),
        "hash": hash_of_row(np.array(parts).tobytes()),
    }


def join_splits(train_rows: Rows, eval_rows: Rows | None) -> Rows:
    """Return the rows of both splits as one, those to train on first, numbered from 0 as one."""
    splits = [rows.dataset for rows in (train_rows, eval_rows) if rows]
    return replace(train_rows, dataset=concatenate_datasets(splits).with_format(None))


def show_pair(row: Mapping[str, Any], tokenizer: Any) -> str:
    """Return the text of a pair, with the answers, which are trained on, in [[ ]]."""
    prompt = tokenizer.decode(row["prompt_ids"])
    chosen = tokenizer.decode(row["chosen_ids"])
    rejected = tokenizer.decode(row["rejected_ids"])
    return f"{prompt}[[{chosen}]] rather than [[{rejected}]]"


# ---- Batches ----
@dataclass(frozen=True)
class PairCollator:
    """Make a batch of n pairs, as 2 n lines: first the chosen, then the rejected ones.

    A batch has:
        inputs: the arguments of the model: input_ids, [lines, tokens], padded on the right, where
            no token attends.
        pairs: the numbers of the pairs, [n].
        row: their numbers in the file, from 1, on the host.
        positions, targets: [m], in the flattened batch, as in TokenCollator.
        cells: [m], where those targets are in the flattened padded lines.
        longest: the number of tokens of the longest line, on the host.
        starts: the number of tokens of each line's prompt, [lines].
        lengths: the number of tokens of the answers, [2, n].
        counts: n, the number of tokens of chosen lines that are trained on, and the number of
            tokens without padding.

    Attributes:
        learn_prompts: train on all tokens of chosen lines, as ORPO does.
        one_line: put all lines into one without padding, for FlashAttention.
        pad_to_multiple_of: the length of a line is a multiple of this.
    """

    columns: ClassVar[list[str]] = ["prompt_ids", "chosen_ids", "rejected_ids", "row"]
    pad_token_id: int
    learn_prompts: bool
    one_line: bool = False
    pad_to_multiple_of: int = 1

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the pairs of `source` whose numbers are in `lines`, which may be []."""
        numbers = [number for line in lines for number in line]
        rows = rows_of_lines(source, lines)
        answers = self._read_answers(rows)
        starts = torch.tensor([len(prompt) for prompt, _ in answers])
        lengths = torch.tensor([len(answer) for _, answer in answers])
        sequences = [torch.tensor([*prompt, *answer]) for prompt, answer in answers]
        ids = pad_sequence(sequences, batch_first=True, padding_value=self.pad_token_id)
        ids = pad(ids, (0, -ids.shape[1] % self.pad_to_multiple_of), value=self.pad_token_id)
        token_indices = torch.arange(ids.shape[1])
        is_filled = token_indices < (starts + lengths)[:, None]
        first = self._first_trained_on(starts, len(rows))
        is_trained_on = (token_indices >= first[:, None]) & is_filled
        cells = is_trained_on.flatten().nonzero()[:, 0]
        inputs: dict[str, Any] = {"input_ids": ids}
        positions = cells - 1
        if self.one_line:
            inputs = put_into_one_line(ids, is_filled)
            # The count of filled cells up to a target is one more than its position, which itself
            # is one more than the position that predicts it.
            positions = is_filled.flatten().cumsum(0)[cells] - 2
        num_pairs = len(rows)
        num_tokens = int(is_filled.sum()) if rows else 0
        num_trained_on = int(is_trained_on[:num_pairs].sum())
        row_numbers = [int(row["row"]) for row in rows]
        return {
            "inputs": inputs,
            "positions": positions,
            "targets": ids.flatten()[cells],
            "cells": cells,
            "longest": ids.shape[1],
            "starts": starts,
            "lengths": lengths[: 2 * num_pairs].view(2, -1),
            "pairs": torch.tensor(numbers, dtype=torch.long),
            "row": row_numbers,
            "counts": torch.tensor([num_pairs, num_trained_on, num_tokens]),
        }

    def _read_answers(self, rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
        """Return each prompt with its chosen answer, then each with its rejected one."""
        answers = []
        for name in ("chosen_ids", "rejected_ids"):
            for row in rows:
                answers.append((row["prompt_ids"], row[name]))
        if not answers:  # A rank without rows takes part with one token.
            answers.append(([self.pad_token_id], []))
        return answers

    def _first_trained_on(self, starts: torch.Tensor, num_pairs: int) -> torch.Tensor:
        """Return the index of each line's first token that is trained on, [lines]."""
        if not self.learn_prompts:
            return starts
        first = starts.clone()
        first[:num_pairs] = 1  # No token predicts the first one.
        return first


def put_into_one_line(ids: torch.Tensor, is_filled: torch.Tensor) -> dict[str, Any]:
    """Return the model's arguments for padded lines, [lines, tokens], put into one without padding.

    Args:
        is_filled: whether a cell holds a token rather than padding, [lines, tokens].
    """
    token_indices = torch.arange(ids.shape[1])
    positions = token_indices.expand_as(ids)
    inputs: dict[str, Any] = ends_of_rows(is_filled.sum(1).tolist())
    inputs["input_ids"] = ids[is_filled][None]
    inputs["position_ids"] = positions[is_filled][None]
    return inputs


@workaround("peft/peft_model.py, disable_adapter", seen="peft 0.21")
@contextlib.contextmanager
def adapters_disabled() -> Generator[None]:
    """Run models without their adapters, and without the modules beside them, in this context.

    peft's disable_adapter changes requires_grad, which FSDP2 records when a model first runs: in
    bf16 and fp16 the next backward pass would fail.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    of_layers = BaseTunerLayer.disable_adapters
    of_modules = AuxiliaryTrainingWrapper.disable_adapters  # those of --modules_to_save
    BaseTunerLayer.disable_adapters = True  # pyrefly: ignore[bad-assignment]  # a property
    AuxiliaryTrainingWrapper.disable_adapters = True  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        BaseTunerLayer.disable_adapters = of_layers
        AuxiliaryTrainingWrapper.disable_adapters = of_modules
