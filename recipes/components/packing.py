# SPDX-License-Identifier: Apache-2.0
"""Batches of rows of tokens: padded, packed into lines, or in one line for FlashAttention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from components.batches import rows_of_lines
from components.int_column import Lengths
from components.lines import Line, best_fit
from components.tokens import NOT_TRAINED_ON


def describe_packing(lines: Sequence[Line], lengths: Lengths, capacity: int) -> str:
    """Return how full the packed sequences are, for the summary."""
    full = lengths.sum() / (len(lines) * capacity)
    return f"{len(lengths)} rows in {len(lines)} lines of {capacity} tokens, {full:.1%} full"


def takes_one_line(attn_implementation: str | None) -> bool:
    """Return whether an attention takes the rows of a batch in one line without padding.

    FlashAttention does, with the ends of the rows as an argument.
    """
    if attn_implementation is None:  # transformers never chooses FlashAttention by itself.
        return False
    return "flash" in attn_implementation or attn_implementation == "varlen"


def ends_of_rows(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of the model that say where rows of these lengths end in one line.

    They are computed here so that no layer has to read them from the device.
    """
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = int(max(lengths))
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@dataclass(frozen=True)
class TokenCollator:
    """Make a batch of lines, each of one row or of several that do not see each other.

    A batch has:
        inputs: the arguments of the model: input_ids, [lines, tokens], padded on the right, where
            no token attends. If rows share a line, also position_ids, which begin at 0 in each row
            and keep rows apart, since there is neither a mask nor a cache.
        positions: [n], in the flattened batch, of the tokens whose next token is trained on.
        targets: [n], those next tokens.
        counts: n, and the number of tokens without padding.
        lengths: the number of tokens of each row, on the host.
        row_lengths: the same by line.
        row: the numbers of the rows in their file, from 1, on the host.

    Attributes:
        width: the length that lines are padded to; 0 pads to the longest of the batch.
        refit: put the rows of a batch into as few lines as they need.
        one_line: put them into one line, for FlashAttention.
        pad_to_multiple_of: the length of a line is a multiple of this.
    """

    columns: ClassVar[list[str]] = ["input_ids", "labels", "row"]
    pad_token_id: int
    width: int = 0
    refit: bool = False
    one_line: bool = False
    pad_to_multiple_of: int = 1

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the rows of `source` whose numbers are in `lines`, which may be []."""
        rows = rows_of_lines(source, lines)
        lengths = [len(row["input_ids"]) for row in rows]
        # A rank without rows runs the model on one token, so that collective calls still match
        nothing = {"input_ids": [self.pad_token_id], "labels": [NOT_TRAINED_ON]}
        laid_out = self._lay_out(rows, lines) if rows else [[nothing]]
        ids, labels, positions = self._fill(laid_out)
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids)}
        if len(rows) > len(laid_out):
            inputs["position_ids"] = torch.from_numpy(positions)
        if self.one_line:
            inputs |= ends_of_rows(lengths or [1])
        trained_on = np.flatnonzero(labels != NOT_TRAINED_ON)
        return {
            "inputs": inputs,
            "positions": torch.from_numpy(trained_on - 1),
            "targets": torch.from_numpy(labels.ravel()[trained_on]),
            "counts": torch.tensor([len(trained_on), sum(lengths)]),
            "lengths": lengths,
            "row_lengths": [[len(row["input_ids"]) for row in line] for line in laid_out],
            "row": [int(row["row"]) for row in rows],
        }

    def _lay_out(
        self, rows: Sequence[Mapping[str, Any]], lines: Sequence[Line]
    ) -> list[list[Mapping[str, Any]]]:
        """Return the rows of each line of the batch."""
        if self.one_line:
            return [list(rows)]
        if self.refit:
            lengths = [len(row["input_ids"]) for row in rows]
            return [[rows[place] for place in line] for line in best_fit(lengths, max(lengths))]
        left = iter(rows)
        return [[next(left) for _ in line] for line in lines]

    def _fill(
        self, laid_out: Sequence[Sequence[Mapping[str, Any]]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return tokens, labels and positions, [lines, tokens] each."""
        widths = [sum(len(row["input_ids"]) for row in line) for line in laid_out]
        if not self.one_line:
            widths.append(self.width)
        width = max(widths)
        shape = len(laid_out), width + -width % self.pad_to_multiple_of
        ids = np.full(shape, self.pad_token_id)
        labels = np.full(shape, NOT_TRAINED_ON)
        positions = np.zeros(shape, dtype=np.int64)
        for number, line in enumerate(laid_out):
            start = 0
            for row in line:
                end = start + len(row["input_ids"])
                ids[number, start:end] = row["input_ids"]
                labels[number, start:end] = row["labels"]
                labels[number, start] = NOT_TRAINED_ON  # No token predicts the first of a row.
                positions[number, start:end] = np.arange(end - start)
                start = end
        return ids, labels, positions
