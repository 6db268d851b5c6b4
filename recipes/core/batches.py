# SPDX-License-Identifier: Apache-2.0
"""Which rows form which batch: a function of seed and epoch only, so that a run continues anywhere.

An optimizer step has the same rows on any number of ranks. A line of a batch is one row or, with
--packing, as many rows as fit, which do not see each other.
"""

import math
import os
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from heapq import heappop, heappush
from typing import Any, ClassVar

import numpy as np
import torch
from accelerate.data_loader import DataLoaderShard

from core.data import IGNORED
from core.engine import Layout

Line = list[int]  # numbers of the rows in one line of a batch
SORTED_STEPS = 50  # optimizer steps whose rows group_by_length sorts at a time


@dataclass(frozen=True)
class Plan:
    """The batches of a run, and how many steps they make.

    Attributes:
        num_lines: lines in a pass over the data.
        lengths: tokens of each row; of each line, [lines], where lines are rows.
    """

    args: Any
    layout: Layout
    num_lines: int
    lengths: np.ndarray | None = None

    @property
    def rows_per_step(self) -> int:
        """Lines of an optimizer step, over all ranks."""
        batches = self.args.gradient_accumulation_steps * self.layout.data_ranks
        return self.args.per_device_train_batch_size * batches

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of a pass over the data; the last one may have fewer lines."""
        return math.ceil(self.num_lines / self.rows_per_step)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the run."""
        if self.args.max_steps > 0:
            return self.args.max_steps
        return math.ceil(self.args.num_train_epochs * self.steps_per_epoch)

    @cached_property
    def evaluate_after(self) -> frozenset[int]:
        """The steps after which --eval_strategy evaluates; 0, before the first, --eval_on_start."""
        if self.args.eval_strategy == "no":
            return frozenset()
        every = self.steps_per_epoch
        if self.args.eval_strategy == "steps":
            every = self.args.eval_steps
        steps = {*range(every, self.total_steps + 1, every), self.total_steps}
        if self.args.eval_on_start:
            steps.add(0)
        return frozenset(steps)

    def describe_batch(self, unit: str = "rows", tokens_per_line: float | None = None) -> str:
        """Return how many rows, lines or pairs a step has, and about how many tokens.

        Args:
            unit: what a line is, where it is no packed one.
            tokens_per_line: on average; None for those of `lengths`.
        """
        if self.lengths is not None and len(self.lengths) > self.num_lines:
            unit = "packed lines"
        number = self.rows_per_step
        text = (
            f"{self.args.per_device_train_batch_size} {unit} "
            f"x {self.args.gradient_accumulation_steps} accumulated "
            f"x {self.layout.data_ranks} in parallel = {number:,} {unit} per step"
        )
        if tokens_per_line is None and self.lengths is not None:
            tokens_per_line = self.lengths.sum() / self.num_lines
        if tokens_per_line is not None:
            text += f", about {tokens_per_line * number:,.0f} tokens"
        return text

    def order_of(self, epoch: int) -> np.ndarray:
        """Return the numbers of all lines in the order of an epoch, by --train_sampling_strategy.

        group_by_length sorts parts of the random order, each from its longest line to its shortest.
        """
        strategy = self.args.train_sampling_strategy
        if strategy == "sequential":
            return np.arange(self.num_lines)
        order = np.random.default_rng((self.args.seed, epoch)).permutation(self.num_lines)
        if strategy == "group_by_length":
            assert self.lengths is not None
            size = SORTED_STEPS * self.rows_per_step
            for start in range(0, self.num_lines, size):
                part = order[start : start + size]
                part[:] = part[np.argsort(-self.lengths[part], kind="stable")]
        return order

    def training_batches(self, first_step: int, counts_on: bool = False) -> Iterator[list[int]]:
        """Yield the numbers of the lines of this rank's micro-batches, to the end of the run.

        Where an epoch ends within a step, batches have fewer lines or none, so that all ranks have
        as many.

        Args:
            counts_on: add `num_lines` to all numbers in each further epoch, for a collator that
                draws something else for a row in each.
        """
        size = self.args.per_device_train_batch_size
        starts = starts_of_batches(self.rows_per_step, size, self.layout)
        epoch = -1
        order = np.empty(0)
        for step in range(first_step, self.total_steps):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = self.order_of(epoch)
                if counts_on:
                    order = order + epoch * self.num_lines
            first = step % self.steps_per_epoch * self.rows_per_step
            for start in starts:
                yield order[first + start : first + start + size].tolist()

    def training_loader(
        self,
        rows: Any,
        collate: Any,
        first_step: int,
        lines: Sequence[Line] | None = None,
        counts_on: bool = False,
    ) -> Any:
        """Return a loader, for one pass, of this rank's micro-batches to the end of the run.

        Args:
            rows: with the data set as its `dataset`.
            collate: makes a batch of the data set and some lines of rows; its `columns` are those
                that it reads. `row` in a batch has the numbers of its rows in their file.
            first_step: steps that are done already.
            lines: numbers of the rows in each line; None for one row per line.
            counts_on: as in `training_batches`.
        """
        return self._loader(rows, collate, self.training_batches(first_step, counts_on), lines)

    def evaluation_loader(self, rows: Any, collate: Any) -> Any:
        """Return a loader of this rank's evaluation batches; None without rows."""
        if rows is None:
            return None
        return self.ordered_loader(rows, collate, range(len(rows)))

    def ordered_loader(self, rows: Any, collate: Any, numbers: Sequence[int]) -> Any:
        """Return a loader of this rank's part of these rows, in their order, one row per line."""
        size = self.args.per_device_eval_batch_size
        starts = starts_of_batches(len(numbers), size, self.layout)
        return self._loader(rows, collate, [numbers[start : start + size] for start in starts])

    def _loader(
        self, rows: Any, collate: Any, batches: Any, lines: Sequence[Line] | None = None
    ) -> Any:
        return DataLoaderShard(
            OneRowPerLine() if lines is None else lines,
            device=self.layout.device,
            batch_sampler=batches,
            collate_fn=partial(collate, rows.dataset.select_columns(collate.columns)),
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.layout.device.type == "cuda",
            _non_blocking=True,
            worker_init_fn=leave_process_group,
            # A loader draws a number when it starts, which must not come from the global generator:
            # that one is seeded for each step and draws dropout
            generator=torch.Generator(),
        )


class OneRowPerLine:
    """Lines of one row each."""

    def __getitem__(self, number: int) -> Line:
        return [number]


def starts_of_batches(number: int, size: int, layout: Layout) -> range:
    """Return where this rank's batches of `size` of a `number` of rows begin.

    Batch j goes to rank j % ranks. All ranks have as many, of which the last may be empty.
    """
    per_round = size * layout.data_ranks
    rounds = math.ceil(number / per_round)
    return range(layout.data_rank * size, rounds * per_round, per_round)


def leave_process_group(worker_id: int) -> None:
    """Give a process that makes batches a group of its own, so that the rank's signals miss it."""
    os.setsid()


def rows_of_lines(source: Any, lines: Sequence[Line]) -> list[Any]:
    """Return the rows of all lines of a batch, one after the other; a rank may have no lines."""
    numbers = [row for line in lines for row in line]
    return source.__getitems__(numbers) if numbers else []


# ---- Packing ----
def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[Line]:
    """Return lines of at most `capacity` tokens by best-fit decreasing (arXiv 2404.10830).

    Rows are placed from the longest to the shortest, each in the line that it fills best, the
    earliest of several. Lines are in the order in which they were begun.

    Args:
        lengths: tokens of each row, from 1 to `capacity`.
    """
    lines: list[Line] = []
    with_room: dict[int, list[int]] = {}  # {tokens that fit: heap of the numbers of lines}
    rooms: list[int] = []  # its keys, ascending
    lengths = np.asarray(lengths, dtype=np.int64)
    for row in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[row])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            number, room = len(lines), capacity
            lines.append([])
        else:
            room = rooms[place]
            number = heappop(with_room[room])
            if not with_room[room]:
                del with_room[room], rooms[place]
        lines[number].append(row)
        room -= length
        if room:
            if room not in with_room:
                with_room[room] = []
                insort(rooms, room)
            heappush(with_room[room], number)
    return lines


# ---- Batches of tokens ----
def takes_one_line(attn_implementation: str | None) -> bool:
    """Return whether an attention takes the rows of a batch in one line, with their ends."""
    name = attn_implementation or ""  # transformers never chooses FlashAttention by itself
    return "flash" in name or name == "varlen"


def ends_of_rows(lengths: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of the model that say where rows of these lengths end in one line.

    They are computed here so that no layer has to read them from the device.
    """
    ends = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    longest = int(max(lengths))
    same = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return same | {"max_length_q": longest, "max_length_k": longest}


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
        height: the number of lines that a batch of this width has at least, with rows or without.
        refit: put the rows of a batch into as few lines as they need.
        one_line: put them into one line, for FlashAttention.
        pad_to_multiple_of: the length of a line is a multiple of this.
    """

    columns: ClassVar[list[str]] = ["input_ids", "labels", "row"]
    pad_token_id: int
    width: int = 0
    height: int = 1
    refit: bool = False
    one_line: bool = False
    pad_to_multiple_of: int = 1

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of the rows of `source` whose numbers are in `lines`, which may be []."""
        return self.make_batch(rows_of_lines(source, lines), lines)

    def make_batch(self, rows: Sequence[Any], lines: Sequence[Line]) -> dict[str, Any]:
        """Return a batch of rows: as many in each line as `lines` has numbers in it."""
        lengths = [len(row["input_ids"]) for row in rows]
        laid_out = self._lay_out(rows, lengths, lines) if rows else []
        shares_lines = len(rows) > len(laid_out)
        # A rank without rows runs the model on one token, so that collective calls still match
        nothing = {"input_ids": [self.pad_token_id], "labels": [IGNORED]}
        height = self.height if self.width and not self.one_line else 1
        laid_out += [[nothing]] * (height - len(laid_out))
        row_lengths = [[len(row["input_ids"]) for row in line] for line in laid_out]
        width = max(sum(line) for line in row_lengths)
        if not self.one_line:
            width = max(width, self.width)
        shape = (len(laid_out), width + -width % self.pad_to_multiple_of)
        ids = np.full(shape, self.pad_token_id)
        labels = np.full(shape, IGNORED)
        positions = np.zeros(shape, dtype=np.int64)
        for number, line in enumerate(laid_out):
            end = 0
            for row in line:
                start = end
                end += len(row["input_ids"])
                ids[number, start:end] = row["input_ids"]
                labels[number, start + 1 : end] = row["labels"][1:]  # No token predicts the first.
                positions[number, start:end] = np.arange(end - start)
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(ids)}
        # A packed batch without rows has them too, since layers would be compiled again
        if shares_lines or (self.width and not rows):
            inputs["position_ids"] = torch.from_numpy(positions)
        if self.one_line:
            inputs |= ends_of_rows(lengths or [1])
        trained_on = np.flatnonzero(labels != IGNORED)
        return {
            "inputs": inputs,
            "positions": torch.from_numpy(trained_on - 1),
            "targets": torch.from_numpy(labels.ravel()[trained_on]),
            "counts": torch.tensor([len(trained_on), sum(lengths)]),
            "lengths": lengths,
            "row_lengths": row_lengths,
            "row": [int(row["row"]) for row in rows],
        }

    def _lay_out(
        self, rows: Sequence[Any], lengths: Sequence[int], lines: Sequence[Line]
    ) -> list[list[Any]]:
        """Return the rows of each line of the batch."""
        if self.one_line:
            return [list(rows)]
        if self.refit:
            return [[rows[place] for place in line] for line in pack(lengths, max(lengths))]
        left = iter(rows)
        return [[next(left) for _ in line] for line in lines]
