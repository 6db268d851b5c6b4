"""Rows of a file, a folder or a hub id, prepared by a function of the recipe.

A row that cannot be used is named by its file, its line, the cause and the fix. Prepared rows are
cached: see components/fingerprints.py for what the cache depends on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from components.columns import Row

if TYPE_CHECKING:
    import datasets

Prepare = Callable[[Row], dict[str, Any]]


class SplitArguments(Protocol):
    """The arguments that say where rows come from; a recipe's dataclass has them."""

    @property
    def dataset_name(self) -> str: ...
    @property
    def dataset_config(self) -> str | None: ...
    @property
    def dataset_train_split(self) -> str: ...
    @property
    def dataset_test_split(self) -> str: ...
    @property
    def eval_dataset_name(self) -> str | None: ...
    @property
    def skip_bad_rows(self) -> bool: ...
    @property
    def dataset_num_proc(self) -> int | None: ...


@dataclass(frozen=True)
class Split:
    """The rows of one split as they are in their files.

    Attributes:
        dataset: the rows; those of a .jsonl file are still lines, in the column `text`.
        name: the data set as the user named it: a file, a folder or a hub id.
        source: what stands before the number of a row: "train.jsonl, line" or "name, row".
        is_training: whether they are trained on rather than evaluated on.
        unread: columns that were dropped because nothing reads them.
    """

    dataset: "datasets.Dataset"
    name: str
    source: str
    is_training: bool
    unread: tuple[str, ...] = ()

    def class_names(self, column: str) -> list[str] | None:
        """Return the names of the classes that a column numbers, or None if it does not."""
        raise NotImplementedError


@dataclass(frozen=True)
class Rows:
    """The prepared rows of a split, in numpy's format.

    Attributes:
        dataset: the columns that the recipe's function returned, except `truncated`, and `row`:
            the number of the row in its file, from 1.
        notes: for the summary: "2260, 3 truncated to --max_length, 0 left out".
        source: what stands before the number of a row: "train.jsonl, line".
    """

    dataset: "datasets.Dataset"
    notes: str
    source: str

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row: the column `length`."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """A hash of all rows, in their order: a resumed run must read the rows it began with."""
        raise NotImplementedError

    def place(self, index: int) -> str:
        """Return where the row at this index comes from: "train.jsonl, line 7"."""
        raise NotImplementedError


def read_splits(
    args: SplitArguments,
    prepare: Prepare,
    *,
    evaluate: bool,
    text_columns: Sequence[str] = (),
    limits: Sequence[str] = ("max_length",),
) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on, as `prepare` makes them.

    This is `open_splits`, then `prepare_rows` of each split.
    """
    raise NotImplementedError


def open_splits(
    args: SplitArguments, *, evaluate: bool, text_columns: Sequence[str] = ()
) -> tuple[Split, Split | None]:
    """Return the split to train on and the one to evaluate on.

    There is nothing to evaluate on if `evaluate` is false, or if no --eval_dataset_name is given
    and --dataset_name has no --dataset_test_split. The process ends with 65 if a file cannot be
    read or has no rows, and with 69 if the hub cannot be reached.

    Args:
        text_columns: columns that are text in a CSV file even if they look like numbers, besides
            those of components.data_files.TEXT_COLUMNS.
    """
    raise NotImplementedError


def prepare_rows(
    split: Split,
    prepare: Prepare,
    args: SplitArguments,
    *,
    limits: Sequence[str] = ("max_length",),
) -> Rows:
    """Return the rows of a split as `prepare` makes them, without those that cannot be used.

    Rows that cannot be used end the process with 65 and are named, unless --skip_bad_rows leaves
    them out. Without a single usable row the process always ends with 65.

    Args:
        prepare: a function of one row, or a `functools.partial` of one. It returns the columns of
            the prepared row, and raises an exception if the row cannot be used; the text of a
            ValueError continues "train.jsonl, line 7: ", as in "has no answer to train on". If
            there is a column `truncated`, it is counted in the notes and then dropped.
        limits: arguments by which `prepare` truncates, for the notes.
    """
    raise NotImplementedError


def describe_rows(train_rows: Rows, eval_rows: Rows | None) -> dict[str, str]:
    """Return the notes of both for the start summary: {"train rows": ..., "eval rows": ...}."""
    raise NotImplementedError
