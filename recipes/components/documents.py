"""Documents to pretrain on: opened as they are, since they may be too many to prepare in advance."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from components.columns import Row
from components.rows import SplitArguments

if TYPE_CHECKING:
    import datasets


class DocumentArguments(SplitArguments, Protocol):
    """The arguments that say where documents come from and which of them are held out."""

    @property
    def text_column(self) -> str: ...
    @property
    def streaming(self) -> bool: ...
    @property
    def num_eval_documents(self) -> int: ...


@dataclass(frozen=True)
class Documents:
    """The documents of a split; they are numbered from 1, over all files of the data set.

    Attributes:
        dataset: rows, in memory maps or, with --streaming, only to be read in order.
        name: the data set as the user named it.
        files: its files; none of a hub id.
        num_before: documents of the data set that come before these: those held out.
        unread: columns that nothing reads.
    """

    dataset: "datasets.Dataset | datasets.IterableDataset"
    name: str
    files: tuple[Path, ...]
    text_column: str
    skip_bad_rows: bool
    num_before: int = 0
    unread: tuple[str, ...] = ()

    @property
    def notes(self) -> str:
        """What the start summary says of columns that nothing reads: "; not read: url", or ""."""
        raise NotImplementedError

    @property
    def fingerprint(self) -> str:
        """A hash of names and sizes: the documents themselves are too many to be read for it."""
        raise NotImplementedError

    def text_of(self, row: Row, number: int) -> str | None:
        """Return the text of a row, or None if it cannot be used and --skip_bad_rows is given.

        Args:
            row: of `dataset`.
            number: of the row in the whole data set, from 1.

        Raises:
            ValueError: it cannot be used: file, line, cause and fix.
        """
        raise NotImplementedError

    def place(self, number: int) -> str:
        """Return where a document is: its file, and the line if the file has lines."""
        raise NotImplementedError


def open_documents(
    args: DocumentArguments, *, evaluate: bool
) -> tuple[Documents, Documents | None]:
    """Return the documents to train on and those to evaluate on, or None.

    With --num_eval_documents the first ones are held out to evaluate on. Besides the files of
    `open_splits`, .txt files are read, each a document; without one that is named after a split,
    all .txt files of a folder are meant.
    """
    raise NotImplementedError
