# SPDX-License-Identifier: Apache-2.0
"""Batches that are cut into the micro-batches of a pipeline, all of one shape."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.nn.functional import pad

from core.batches import Line, TokenCollator


@dataclass(frozen=True)
class PipelineCollator:
    """Make a batch as TokenCollator does, with a number of rows that micro-batches divide.

    Its rows are all as long as the longest of the batch, in every micro-batch. `positions` and
    `targets` are lists, with those of each micro-batch; the positions are in the micro-batch.

    Attributes:
        num_rows: rows that a batch is filled up to, with rows of padding that nothing is learned
            from.
        num_microbatches: of each batch.
    """

    columns: ClassVar[list[str]] = TokenCollator.columns
    collate: TokenCollator
    num_rows: int
    num_microbatches: int

    def for_rows(self, num_rows: int) -> "PipelineCollator":
        """Return a collator for batches of at most this many rows, in as many micro-batches."""
        filled_up = num_rows + -num_rows % self.num_microbatches
        return replace(self, num_rows=filled_up)

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the rows of `source` whose numbers are in `lines`, which may be []."""
        batch = self.collate(source, lines)
        inputs = {}
        for name, tensor in batch["inputs"].items():
            filling = self.collate.pad_token_id if name == "input_ids" else 0
            missing = self.num_rows - len(tensor)
            inputs[name] = pad(tensor, (0, 0, 0, missing), value=filling)
        tokens = inputs["input_ids"].numel() // self.num_microbatches
        starts = torch.arange(self.num_microbatches) * tokens
        cuts = torch.searchsorted(batch["positions"], starts[1:])
        positions = batch["positions"].tensor_split(cuts)
        return {
            **batch,
            "inputs": inputs,
            "positions": [part - start for part, start in zip(positions, starts, strict=True)],
            "targets": list(batch["targets"].tensor_split(cuts)),
        }


def micro_batches_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the micro-batches of a batch, as PipelineCollator makes it.

    Each has `positions` and `targets`, as LossInHead takes them, and in `inputs` what a stage is
    given besides what it receives, such as the position_ids of packed rows.
    """
    number = len(batch["targets"])
    others = []
    for name, tensor in batch["inputs"].items():
        if name != "input_ids":
            others.append([(name, part) for part in tensor.chunk(number)])
    for place in range(number):
        yield {
            "inputs": dict(parts[place] for parts in others),
            "positions": batch["positions"][place],
            "targets": batch["targets"][place],
        }
