# SPDX-License-Identifier: Apache-2.0
"""Pairs of whole answers for reward models: their tokens, batches of them, and their rewards."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from core.batches import Line, rows_of_lines
from core.chat import ChatTemplate, find_tools
from core.data import Row, Rows, hash_of_row, rename_columns, tokenize_text
from core.exits import Exit, fail
from tasks.labels import pad_texts
from tasks.pairs import BETWEEN_PARTS, read_pair, render_with_answer

METRICS = ["accuracy", "margin", "mean_reward"]  # TRL's names


# ---- Rows ----
def tokenize_whole_answers(
    row: Row, template: ChatTemplate, columns: Mapping[str, str]
) -> dict[str, Any]:
    """Return the tokens of a row's prompt with each of both answers, and its margin.

    As in TRL, texts end with the end of sequence, and conversations as their template ends them.

    Args:
        columns: {role: name of its column}, from --columns.

    Raises:
        ValueError: if there is no such pair, or the template drops what was said.
    """
    row = rename_columns(row, columns)
    prompt, *answers = read_pair(row)
    tokenizer = template.tokenizer
    encoded = []
    for answer in answers:
        if isinstance(prompt, str):
            text = prompt + answer.removesuffix(tokenizer.eos_token) + tokenizer.eos_token
            encoded.append(tokenize_text(text, tokenizer))
        else:
            _, text = render_with_answer(prompt, answer, find_tools(row), template)
            tokens = tokenizer(text, add_special_tokens=False, verbose=False)
            encoded.append(tokens["input_ids"])
    chosen_ids, rejected_ids = encoded
    if chosen_ids == rejected_ids:
        raise ValueError("has two equal answers, of which none can be better")
    margin = read_margin(row)
    parts = np.array([*chosen_ids, BETWEEN_PARTS, *rejected_ids]).tobytes()
    return {
        "chosen_ids": chosen_ids,
        "rejected_ids": rejected_ids,
        "margin": margin,
        "length": max(len(chosen_ids), len(rejected_ids)),
        "largest": max(*chosen_ids, *rejected_ids),
        "hash": hash_of_row(parts + str(margin).encode()),
    }


def read_margin(row: Row) -> float:
    """Return by how much the chosen answer is to be better, 0 where nothing is in the column.

    Raises:
        ValueError: if it is no number.
    """
    value = row.get("margin")
    try:
        return float(value or 0)  # A CSV file has numbers as texts
    except (TypeError, ValueError):
        raise ValueError(f"has no number in margin: {value!s:.80}") from None


def leave_out_long(rows: Rows, max_length: int) -> Rows:
    """Return the pairs of which both answers fit, as in TRL: a cut answer may lose what is judged.

    Ends with 65 if there is none.
    """
    fits = np.flatnonzero(rows.lengths <= max_length)
    if not len(fits):
        fail(Exit.DATA, f"{rows.sources[0].name}: no pair fits into --max_length {max_length}")
    if len(fits) == len(rows):
        return rows
    notes = f"{rows.notes}; {len(rows) - len(fits)} longer than --max_length left out"
    return replace(rows, dataset=rows.dataset.select(fits), notes=notes)


@dataclass(frozen=True)
class RewardCollator:
    """Make a batch of n pairs, as 2 n lines: first the chosen answers, then the rejected ones.

    A batch has these entries:
        inputs: what the model takes, [2 n, tokens], padded on the right.
        margins: [n].
        counts: n, and the number of tokens without padding.
        row: numbers of the rows in their file, from 1, on the host.
    """

    columns: ClassVar[list[str]] = ["chosen_ids", "rejected_ids", "margin", "row"]
    tokenizer: Any

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the pairs of `source` whose numbers are in `lines`, which may be []."""
        pairs = rows_of_lines(source, lines)
        texts = []
        for name in ("chosen_ids", "rejected_ids"):
            texts += [{"input_ids": pair[name], "token_type_ids": []} for pair in pairs]
        num_tokens = sum(len(text["input_ids"]) for text in texts)
        return {
            "inputs": pad_texts(texts, self.tokenizer),
            "margins": torch.tensor([float(pair["margin"]) for pair in pairs]),
            "counts": torch.tensor([len(pairs), num_tokens]),
            "row": [int(pair["row"]) for pair in pairs],
        }


# ---- Rewards ----
def rewards_of(model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return the rewards of a batch's pairs in fp32, [2, pairs], the chosen answers first.

    A decoder of transformers reads a reward at the last token that is not the pad token of the
    config, whatever the mask says. On a rank without pairs the model runs too, for no reward.
    """
    num_pairs = len(batch["margins"])
    rewards = model(**batch["inputs"], use_cache=False).logits.float()
    return rewards[: 2 * num_pairs, 0].view(2, num_pairs)


def pair_losses(
    rewards: torch.Tensor, margins: torch.Tensor, center_rewards_coefficient: float
) -> torch.Tensor:
    """Return the loss of each pair, [pairs], as TRL's RewardTrainer computes it.

    That of Bradley and Terry with margins (arXiv 2307.09288, section 3.2.2), and what keeps the sum
    of both rewards near 0 (arXiv 2312.09244).
    """
    chosen, rejected = rewards
    losses = -logsigmoid(chosen - rejected - margins)
    return losses + center_rewards_coefficient * (chosen + rejected).square()


def sums_of(rewards: torch.Tensor) -> torch.Tensor:
    """Return METRICS in their order, summed over pairs, [3]."""
    chosen, rejected = rewards.detach()
    is_right = (chosen > rejected).float()
    return torch.stack([is_right, chosen - rejected, (chosen + rejected) / 2]).sum(1)
