# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers to one prompt for preference tuning: their tokens, and batches of them."""

import contextlib
import copy
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from datasets import concatenate_datasets

from core.batches import Line, TokenCollator, rows_of_lines
from core.chat import (
    ChatTemplate,
    Conversation,
    check_nothing_is_lost,
    close_last_turn,
    fit_arguments,
    make_conversation,
    note_plain_template,
)
from core.data import IGNORED, Row, Rows, hash_of_row, missing_columns, tokenize_text
from core.workarounds import workaround

BETWEEN_PARTS = -1  # In the hash of a pair, between its parts: no token has this number.


# ---- Rows ----
def read_pair(row: Row) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a row, all texts or all lists of messages.

    Where the prompt is not of the answers' kind, or missing, both answers begin with it.
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
    for name, answer in (("chosen", chosen), ("rejected", rejected)):
        if not answer or (isinstance(answer, str) and not answer.strip()):
            raise ValueError(f"has no text in {name}")
    if type(prompt) is type(chosen):
        return prompt, chosen, rejected
    return split_shared_prompt(chosen, rejected)


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
    prompt: Sequence[Any],
    chosen: Sequence[Any],
    rejected: Sequence[Any],
    tools: list[dict[str, Any]],
    template: ChatTemplate,
    max_length: int,
) -> dict[str, Any]:
    """Return the tokens of a prompt, up to where an answer begins, and of both answers.

    Args:
        prompt, chosen, rejected: lists of messages.
        max_length: as in `tokenize_text_pair`.

    Raises:
        ValueError: if nothing is left to compare, or the template drops what was said.
    """
    texts = []
    asked = Conversation([])
    for answer in (chosen, rejected):
        conversation, text = render_with_answer(prompt, answer, tools, template)
        texts.append(close_last_turn(text, template))
        asked = conversation.up_to(len(prompt))
    encoded = []
    for text in (template.render(asked, add_generation_prompt=True), *texts):
        tokens = template.tokenizer(text, add_special_tokens=False, verbose=False)
        encoded.append(tokens["input_ids"])
    return split_pair(encoded, max_length)


def render_with_answer(
    prompt: Sequence[Any],
    answer: Sequence[Any],
    tools: list[dict[str, Any]],
    template: ChatTemplate,
) -> tuple[Conversation, str]:
    """Return the conversation of a prompt and one answer to it, and its text by the template.

    Raises:
        ValueError: if the template drops what was said.
    """
    conversation = make_conversation([*prompt, *answer], tools, num_asked=len(prompt))
    conversation = fit_arguments(conversation, template)
    text = template.render(conversation)
    # Templates may drop the reasoning of all messages but the last
    before_last = range(len(conversation.messages) - 1)
    check_nothing_is_lost(conversation, text, template, before_last)
    return conversation, text


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
    pair = f"{prompt}[[{chosen}]] rather than [[{rejected}]]"
    return pair + note_plain_template(tokenizer)


# ---- Batches ----
@dataclass(frozen=True)
class PairCollator(TokenCollator):
    """Make a batch of n pairs, as 2 n lines: first the chosen, then the rejected ones.

    A batch has inputs, positions and targets as in TokenCollator, whose answers are trained on, and
        pairs: the numbers of the pairs, [n].
        row: their numbers in the file, from 1, on the host.
        cells: [m], where the targets are in the flattened lines if these are padded on the right.
        longest: the number of tokens of a padded line, on the host.
        starts: the number of tokens of each line's prompt, [lines].
        lengths: the number of tokens of the answers, [2, n].
        counts: n, the number of tokens of chosen lines that are trained on, and the number of
            tokens without padding.

    Attributes:
        learn_prompts: train on all tokens of chosen lines, as ORPO does.
    """

    columns: ClassVar[list[str]] = ["prompt_ids", "chosen_ids", "rejected_ids", "row"]
    learn_prompts: bool = False

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the pairs of `source` whose numbers are in `lines`, which may be []."""
        pairs = rows_of_lines(source, lines)
        num_pairs = len(pairs)
        rows = []
        for name in ("chosen_ids", "rejected_ids"):
            for pair in pairs:
                ids = [*pair["prompt_ids"], *pair[name]]
                labels = [IGNORED] * len(pair["prompt_ids"]) + list(pair[name])
                if self.learn_prompts and name == "chosen_ids":
                    labels = ids
                rows.append({"input_ids": ids, "labels": labels, "row": pair["row"]})
        batch = self.make_batch(rows, [[number] for number in range(len(rows))])
        starts = [len(pair["prompt_ids"]) for pair in pairs] * 2
        lengths = torch.tensor(batch["lengths"], dtype=torch.long)
        cells = batch["positions"] + 1
        longest = batch["inputs"]["input_ids"].shape[1]
        if self.one_line and rows:
            longest = int(lengths.max())
            lines_of_tokens = torch.repeat_interleave(torch.arange(len(rows)), lengths)
            padding_before = torch.arange(len(rows)) * longest - lengths.cumsum(0) + lengths
            cells = cells + padding_before[lines_of_tokens[cells]]
        num_trained_on = int((cells < num_pairs * longest).sum())
        answers = lengths - torch.tensor(starts, dtype=torch.long)
        numbers = [number for line in lines for number in line]
        return {
            **batch,
            "cells": cells,
            "longest": longest,
            "starts": torch.tensor(starts or [1]),  # without pairs, of a line of one token
            "lengths": answers.view(2, num_pairs),
            "pairs": torch.tensor(numbers, dtype=torch.long),
            "row": [int(pair["row"]) for pair in pairs],
            "counts": torch.tensor([num_pairs, num_trained_on, int(lengths.sum())]),
        }


# ---- Models ----
def turn_off_dropout(model: torch.nn.Module) -> None:
    """Turn off all that is random but --lora_dropout: only training is to change what a model says.

    Layers that read the config while they run get a copy of it; the model saves its own.
    """
    copies: dict[int, Any] = {}
    for path, module in model.named_modules():
        if ".lora_dropout." in path:
            continue
        set_rates_to_0(module)
        if module is not model and "config" in vars(module):
            module.config = copy.deepcopy(module.config, copies)
            set_rates_to_0(module.config)


def set_rates_to_0(holder: Any) -> None:
    """Set the rates of dropout, of left-out layers (LayerDrop) and of a router's noise to 0."""
    for name, value in vars(holder).items():
        is_rate = name == "p" or "drop" in name or "jitter" in name
        if is_rate and isinstance(value, float):
            setattr(holder, name, 0.0)


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
