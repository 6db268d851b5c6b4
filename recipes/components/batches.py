# SPDX-License-Identifier: Apache-2.0
"""Which rows form which batch of a run: a function of seed and epoch only.

A run can therefore continue at any step without reading what lies before it, and an optimizer step
has the same rows on any number of ranks.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from components.arguments import CommonArguments, EvalOnStartArguments, SamplingArguments
from components.best import require_rows_to_choose_by
from components.lines import Line, OnePerLine
from components.mesh import Mesh
from components.plugins import pipeline_ranks
from components.rows import Rows
from components.watch import leave_process_group

SORTED_STEPS = 50  # optimizer steps whose rows group_by_length sorts at a time


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


def global_batches(
    num_lines: int,
    batch_size: int,
    batches_per_step: int,
    num_epochs: int = 1,
    seed: int | None = None,
    lengths: np.ndarray | None = None,
) -> list[list[int]]:
    """Return the batches of all ranks and epochs, in order, as lists of line numbers.

    accelerate gives batch j to rank j % ranks. Empty batches fill each epoch up to whole steps.

    Args:
        batches_per_step: micro-batches per optimizer step, over all ranks.
        seed: seed of the order of each epoch; None keeps the lines in their order.
        lengths: lengths of the lines; if given, every SORTED_STEPS steps are sorted by length.
    """
    batches: list[list[int]] = []
    for epoch in range(num_epochs):
        order = np.arange(num_lines)
        if seed is not None:
            order = np.random.default_rng((seed, epoch)).permutation(num_lines)
        if lengths is not None:
            order = sort_in_parts(order, lengths, SORTED_STEPS * batch_size * batches_per_step)
        for start in range(0, num_lines, batch_size):
            batches.append(order[start : start + batch_size].tolist())
        missing = -len(batches) % batches_per_step
        batches += [[] for _ in range(missing)]
    return batches


def sort_in_parts(order: np.ndarray, lengths: np.ndarray, size: int) -> np.ndarray:
    """Return an order in which each part of `size` lines begins with its longest."""
    parts = np.split(order, range(size, len(order), size))
    return np.concatenate([part[np.argsort(-lengths[part], kind="stable")] for part in parts])


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
        lengths: np.ndarray | None = None,
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

    def batches_from(self, first_step: int) -> list[list[int]]:
        """Return the batches of all ranks from a step to the end of the run."""
        order = "random"
        if isinstance(self._args, SamplingArguments):
            order = self._args.train_sampling_strategy
        batches = global_batches(
            self._num_lines,
            self._args.per_device_train_batch_size,
            self._batches_per_step,
            num_epochs=self.num_epochs,
            seed=None if order == "sequential" else self._args.seed,
            lengths=self._lengths if order == "group_by_length" else None,
        )
        first = first_step * self._batches_per_step
        return batches[first : self.total_steps * self._batches_per_step]

    def training_loader(
        self,
        rows: Rows,
        collate: Collator,
        first_step: int,
        lines: Sequence[Line] | None = None,
    ) -> DataLoader:
        """Return a loader of this rank's micro-batches to the end of the run, on its device.

        Args:
            first_step: steps that are done already.
            lines: numbers of the rows in each line; None for one row per line.
        """
        if lines is None:
            lines = OnePerLine(len(rows))
        return self._loader(rows, lines, self.batches_from(first_step), collate)

    def augmenting_loader(self, rows: Rows, collate: Collator, first_step: int) -> DataLoader:
        """Return a loader like `training_loader`, for a collator that augments rows.

        Each line is the number of an EpochRow.
        """
        batches = self.batches_from(first_step)
        first = first_step * self._batches_per_step
        batches_per_epoch = self.steps_per_epoch * self._batches_per_step
        for place, batch in enumerate(batches, first):
            epoch = place // batches_per_epoch
            batch[:] = [EpochRow(epoch, row).number(len(rows)) for row in batch]
        return self._loader(rows, OnePerLine(len(rows) * self.num_epochs), batches, collate)

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
        batches = global_batches(len(numbers), size, self._data_ranks)
        batches = [[numbers[place] for place in batch] for batch in batches]
        return self._loader(rows, OnePerLine(len(rows)), batches, collate)

    def _loader(
        self,
        rows: Rows,
        lines: Sequence[Line],
        batches: Sequence[list[int]],
        collate: Collator,
    ) -> DataLoader:
        """Return a loader of this rank's part of the batches of all ranks."""
        source = rows.dataset.select_columns(collate.columns)
        batches = self._for_all_ranks(batches)
        loader = DataLoader(
            # pyrefly: ignore[bad-argument-type]  # a sequence has all that a data set needs
            lines,
            batch_sampler=batches,
            collate_fn=partial(collate, source),
            num_workers=self._num_workers,
            pin_memory=self._accelerator.device.type == "cuda",
            worker_init_fn=leave_process_group,
            # A loader draws a number when it starts, which must not come from the global generator:
            # that one is seeded for each step and draws dropout
            generator=torch.Generator(),
        )
        return self._accelerator.prepare(loader)

    def _for_all_ranks(self, batches: Sequence[list[int]]) -> list[list[int]]:
        """Return the batches as accelerate deals them, batch j to rank j % ranks.

        Ranks r, r + pipelines, r + 2 pipelines and so on are one pipeline and get the same; so do
        neighbors that share a row under DeepSpeed. Of the other meshes accelerate knows by itself
        which ranks share rows.
        """
        sharing = Mesh.of(self._accelerator).sp
        batches = [batch for batch in batches for _ in range(sharing)]
        dealt: list[list[int]] = []
        for start in range(0, len(batches), self._data_ranks):
            for _ in range(pipeline_ranks(self._accelerator)):
                dealt += batches[start : start + self._data_ranks]
        return dealt


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
