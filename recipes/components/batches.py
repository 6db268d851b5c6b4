# SPDX-License-Identifier: Apache-2.0
"""Which rows form which batch of a run: a function of seed and epoch only.

A run can therefore continue at any step without reading what lies before it, and an optimizer step
has the same rows on any number of ranks.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

from components.arguments import CommonArguments, EvalOnStartArguments, SamplingArguments
from components.best import require_rows_to_choose_by
from components.int_column import Lengths
from components.lines import Line, OnePerLine
from components.mesh import Mesh
from components.plugins import pipeline_ranks
from components.rows import Rows
from components.shuffling import FileOrder, Order, SortedInParts, shuffled
from components.watch import leave_process_group

SORTED_STEPS = 50  # optimizer steps whose rows group_by_length sorts at a time
ROWS_AT_ONCE = 4096  # rows whose places in the order are computed at a time
# The places between the first and the last of these: group_by_length sorts the rows at all of them,
# which are a thousand times as many on a thousand ranks
PLACES_AT_ONCE = 2**18


class Collator(Protocol):
    """A function that makes a batch of lines of rows.

    A batch has what the recipe reads and `row`: the numbers of its rows in their file, by which
    `Run.skip_if_not_finite` names them when a step is not finite.

    Attributes:
        columns: the columns of the data set that it reads.
    """

    columns: ClassVar[list[str]]

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]: ...


def rows_of_lines(source: Any, lines: Sequence[Line]) -> list[Any]:
    """Return the rows of all lines of a batch, one after the other; a rank may have no lines.

    Args:
        source: a data set of the library datasets, which reads several rows at once.
    """
    numbers = [row for line in lines for row in line]
    if not numbers:
        return []
    return source.__getitems__(numbers)


class EpochRow(NamedTuple):
    """A row in one pass over the data, for a collator that augments it in each pass differently.

    A loader gives its collator only numbers. So row and epoch are in one: the number of the row if
    the rows of all epochs are counted, epoch after epoch.

    Attributes:
        epoch: the pass over the data, from 0.
        row: the number of the row in its data set, from 0.
    """

    epoch: int
    row: int

    def number(self, num_rows: int) -> int:
        """Return the number that stands for both; the data set has `num_rows` rows."""
        return self.epoch * num_rows + self.row

    @classmethod
    def of_number(cls, number: int, num_rows: int) -> "EpochRow":
        """Return the epoch and the row for which `number` stands."""
        epoch, row = divmod(number, num_rows)
        return cls(epoch, row)


def order_of_file(epoch: int) -> Order:
    """Return the order of the rows in their file, which every epoch has."""
    del epoch  # Each other function of this kind needs it
    return FileOrder()


class Batches:
    """The batches of all ranks and epochs, in order, as lists of line numbers.

    They are computed when they are read, from any of them on. Empty batches fill each epoch up to
    whole steps.
    """

    def __init__(
        self,
        num_lines: int,
        batch_size: int,
        batches_per_step: int = 1,
        num_epochs: int = 1,
        order_of_epoch: Callable[[int], Order] = order_of_file,
        counts_on: bool = False,
    ) -> None:
        """Cut epochs of `num_lines` lines into batches.

        Args:
            batches_per_step: micro-batches per optimizer step, over all ranks.
            order_of_epoch: a function that returns the order of the lines in an epoch.
            counts_on: whether lines have other numbers in each epoch, those of `EpochRow`.
        """
        self._num_lines = num_lines
        self._batch_size = batch_size
        num_steps = math.ceil(num_lines / (batch_size * batches_per_step))
        self._batches_per_epoch = num_steps * batches_per_step
        self._num_epochs = num_epochs
        self._order_of_epoch = order_of_epoch
        self._counts_on = counts_on

    def __len__(self) -> int:
        return self._num_epochs * self._batches_per_epoch

    def __iter__(self) -> Iterator[list[int]]:
        return self.read(range(len(self)))

    def read(self, numbers: range) -> Iterator[list[int]]:
        """Yield the batches of these numbers, computing some thousand rows at a time."""
        most = min(ROWS_AT_ONCE, PLACES_AT_ONCE // numbers.step)
        batches_at_once = max(1, most // self._batch_size)
        order: Order = FileOrder()
        epoch_of_order = -1
        for first in range(0, len(numbers), batches_at_once):
            some = numbers[first : first + batches_at_once]
            for epoch, in_epoch in groupby(some, self._epoch_of):
                if epoch != epoch_of_order:
                    order = self._order_of_epoch(epoch)
                    epoch_of_order = epoch
                yield from self._read_epoch(epoch, order, np.array(list(in_epoch)))

    def _epoch_of(self, number: int) -> int:
        """Return the epoch to which a batch belongs."""
        return number // self._batches_per_epoch

    def _read_epoch(self, epoch: int, order: Order, numbers: np.ndarray) -> Iterator[list[int]]:
        """Yield the batches of these numbers, which are in one epoch."""
        starts = numbers % self._batches_per_epoch * self._batch_size
        places = starts[:, None] + np.arange(self._batch_size)
        exist = places < self._num_lines
        lines = order.at(places[exist])
        if self._counts_on:
            lines = lines + EpochRow(epoch, 0).number(self._num_lines)
        for batch in np.split(lines, np.cumsum(exist.sum(axis=1))[:-1]):
            yield batch.tolist()


class BatchesOfRank:
    """The batches of one rank: a batch sampler for a loader."""

    def __init__(self, batches: Batches, numbers: range) -> None:
        """numbers: which of the batches of all ranks these are."""
        self._batches = batches
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[list[int]]:
        return self._batches.read(self._numbers)


class BatchPlan:
    """The batches of a whole run, and how many steps they make.

    Attributes:
        rows_per_step: lines per optimizer step, over all ranks.
        steps_per_epoch: optimizer steps per pass over the data; the last one may have fewer lines.
        total_steps: optimizer steps of the run.
        evaluate_after: the steps after which to evaluate; 0 means before the first.
    """

    def __init__(
        self,
        args: CommonArguments,
        accelerator: Accelerator,
        num_lines: int,
        lengths: Lengths | None = None,
        num_workers: int = 0,
    ) -> None:
        """Plan the batches of `num_lines` lines.

        Args:
            lengths: tokens of each line, which --train_sampling_strategy group_by_length needs.
            num_workers: processes per rank that make batches; with 0, this process makes them.
        """
        self._num_workers = num_workers
        self._args = args
        self._accelerator = accelerator
        self._num_lines = num_lines
        self._lengths = lengths
        self._data_ranks = Mesh.of(accelerator).data_ranks
        self._batches_per_step = args.gradient_accumulation_steps * self._data_ranks
        self.rows_per_step = args.per_device_train_batch_size * self._batches_per_step
        self.steps_per_epoch = math.ceil(num_lines / self.rows_per_step)
        self.total_steps = args.max_steps
        if args.max_steps <= 0:
            assert args.num_train_epochs is not None
            self.total_steps = math.ceil(args.num_train_epochs * self.steps_per_epoch)
        self.evaluate_after = evaluation_steps(args, self.steps_per_epoch, self.total_steps)

    def describe(self, unit: str, tokens_per_line: float = 0) -> str:
        """Return a line of the start summary about the effective batch.

        Args:
            unit: what a step is counted in: rows, lines or pairs.
        """
        return describe_batch(self._args, self._accelerator, unit, tokens_per_line)

    @property
    def num_epochs(self) -> int:
        """The passes over the data that the run begins."""
        return math.ceil(self.total_steps / self.steps_per_epoch)

    def batches(self, order: int, counts_on: bool = False) -> Batches:
        """Return the batches of all ranks of the run.

        Args:
            order: the version of the order of rows (components/shuffling.py).
            counts_on: as in `Batches`.
        """
        return Batches(
            self._num_lines,
            self._args.per_device_train_batch_size,
            self._batches_per_step,
            self.num_epochs,
            partial(self._order_of_epoch, order),
            counts_on,
        )

    def _order_of_epoch(self, version: int, epoch: int) -> Order:
        """Return the order of the lines in an epoch, by --train_sampling_strategy."""
        strategy = "random"
        if isinstance(self._args, SamplingArguments):
            strategy = self._args.train_sampling_strategy
        if strategy == "sequential":
            return FileOrder()
        order = shuffled(self._num_lines, (self._args.seed, epoch), version)
        if strategy == "random":
            return order
        assert self._lengths is not None
        return SortedInParts(order, self._lengths, SORTED_STEPS * self.rows_per_step)

    def training_loader(
        self,
        rows: Rows,
        collate: Collator,
        first_step: int,
        order: int,
        lines: Sequence[Line] | None = None,
    ) -> DataLoader:
        """Return a loader of this rank's micro-batches to the end of the run, on its device.

        Args:
            first_step: steps that are done already.
            order: the version of the order of rows that the run began with.
            lines: numbers of the rows in each line; None for one row per line.
        """
        if lines is None:
            lines = OnePerLine(range(len(rows)))
        return self._loader(rows, lines, self.batches(order), collate, self._steps_from(first_step))

    def augmenting_loader(
        self, rows: Rows, collate: Collator, first_step: int, order: int
    ) -> DataLoader:
        """Return a loader like `training_loader`, for a collator that augments rows.

        Each line is the number of an EpochRow.
        """
        lines = OnePerLine(range(len(rows) * self.num_epochs))
        batches = self.batches(order, counts_on=True)
        return self._loader(rows, lines, batches, collate, self._steps_from(first_step))

    def _steps_from(self, first_step: int) -> range:
        """Return the numbers of the batches of all ranks from a step to the end of the run."""
        return range(first_step * self._batches_per_step, self.total_steps * self._batches_per_step)

    def evaluation_loader(
        self, rows: Rows | None, collate: Collator, numbers: range | None = None
    ) -> DataLoader | None:
        """Return a loader of this rank's evaluation batches, one row per line; None without rows.

        Args:
            numbers: the rows to evaluate on; None for all.
        """
        if numbers is None and rows is not None:
            numbers = range(len(rows))
        require_rows_to_choose_by(self._args, numbers, "--eval_split")
        if rows is None or not numbers:
            return None
        return self.ordered_loader(rows, collate, numbers)

    def ordered_loader(self, rows: Rows, collate: Collator, numbers: Sequence[int]) -> DataLoader:
        """Return a loader of this rank's part of these rows, in their order, one row per line."""
        size = self._args.per_device_eval_batch_size
        batches = Batches(len(numbers), size, self._data_ranks)
        return self._loader(rows, OnePerLine(numbers), batches, collate, range(len(batches)))

    def _loader(
        self,
        rows: Rows,
        lines: Sequence[Line],
        batches: Batches,
        collate: Collator,
        numbers: range,
    ) -> DataLoader:
        """Return a loader of this rank's part of the batches of all ranks with these numbers.

        Batch j goes to rank j % ranks; ranks that share rows get the same. accelerate would deal
        alike, except for ranks of a pipeline and of DeepSpeed's sequence parallelism, but would
        make the batches of all ranks on each.
        """
        source = rows.dataset.select_columns(collate.columns)
        own = numbers[Mesh.of(self._accelerator).data_rank :: self._data_ranks]
        loader = DataLoader(
            # pyrefly: ignore[bad-argument-type]  # a sequence has all that a data set needs
            lines,
            batch_sampler=BatchesOfRank(batches, own),
            collate_fn=partial(collate, source),
            num_workers=self._num_workers,
            pin_memory=self._accelerator.device.type == "cuda",
            worker_init_fn=leave_process_group,
            # A loader draws a number when it starts, which must not come from the global generator:
            # that one is seeded for each step and draws dropout
            generator=torch.Generator(),
        )
        return prepare_data_loader(
            loader,
            self._accelerator.device,
            num_processes=1,  # The batches are dealt already
            process_index=0,
            put_on_device=True,
            non_blocking=self._accelerator.non_blocking,
        )


def describe_batch(
    args: CommonArguments, accelerator: Accelerator, unit: str, tokens_per_line: float = 0
) -> str:
    """Return the effective batch as a product, and about how many tokens it has.

    Args:
        unit: what a step is counted in: rows, lines or pairs.
    """
    processes = "process" if accelerator.device.type == "cpu" else "GPU"
    micro_batches = args.gradient_accumulation_steps
    data_ranks = Mesh.of(accelerator).data_ranks
    batch = "micro-batch"
    if pipeline_ranks(accelerator) > 1:
        processes = "pipeline"
        batch = "batch"  # It is cut into the pipeline's own micro-batches
    elif Mesh.of(accelerator).copies > 1:
        processes = "group"
    number = args.per_device_train_batch_size * micro_batches * data_ranks
    text = (
        f"{args.per_device_train_batch_size} {unit} x {counted(micro_batches, batch)} x "
        f"{counted(data_ranks, processes)} = {number:,} {unit} per step"
    )
    if tokens_per_line:
        text += f", about {tokens_per_line * number:,.0f} tokens"
    return text


def counted(number: int, noun: str) -> str:
    """Return a number and its noun, in the plural unless it is 1."""
    if number == 1:
        return f"1 {noun}"
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{number} {noun}{ending}"


def evaluation_steps(
    args: CommonArguments, steps_per_epoch: int, total_steps: int
) -> frozenset[int]:
    """Return the steps after which --eval_strategy and --eval_on_start evaluate."""
    if args.eval_strategy == "no":
        return frozenset()
    every = {"steps": args.eval_steps, "epoch": steps_per_epoch}[args.eval_strategy]
    steps = set(range(every, total_steps + 1, every))
    steps.add(total_steps)
    if isinstance(args, EvalOnStartArguments) and args.eval_on_start:
        steps.add(0)
    return frozenset(steps)
