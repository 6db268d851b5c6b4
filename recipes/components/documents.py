# SPDX-License-Identifier: Apache-2.0
"""Documents to pretrain on, which may be too many to be prepared before training."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import xxhash
from datasets import Dataset, IterableDataset

from components.bad_rows import explain
from components.data_files import (
    DOCUMENT_TYPES,
    Source,
    decode,
    find_files,
    load_rows,
    load_stream,
    parse_line,
)
from components.rows import HasDataArguments, evaluation_source, require, training_source
from core.data import MAX_SHOWN, Row, list_columns, missing_columns, note_unread
from core.exits import Exit, fail


class HasDocumentArguments(HasDataArguments, Protocol):
    """What also has the arguments of documents: their column, and how many are held out."""

    @property
    def dataset_name(self) -> str: ...
    @property
    def text_column(self) -> str: ...
    @property
    def streaming(self) -> bool: ...
    @property
    def num_eval_documents(self) -> int: ...


@dataclass(frozen=True)
class Documents:
    """The documents of a split, numbered from 1 over all files of the data set.

    Attributes:
        dataset: the rows of the documents; with --streaming, they can only be read in order.
        source: where the documents are.
        text_column: the column with the text.
        skip_bad_rows: whether documents that cannot be used are left out.
        num_before: the number of documents before these, which are held out.
        unread: the columns that nothing reads.
    """

    dataset: Dataset | IterableDataset
    source: Source
    text_column: str
    skip_bad_rows: bool
    num_before: int = 0
    unread: tuple[str, ...] = ()

    @property
    def notes(self) -> str:
        """What the start summary says about unread columns: "; not read: url", or ""."""
        return note_unread(dict.fromkeys(self.unread, 1), 1)

    @property
    def fingerprint(self) -> str:
        """A hash of names and sizes, since the documents may be too many to be read for it."""
        known: object = [(file.name, file.stat().st_size) for file in self.source.files]
        if not known:
            info = self.dataset.info
            num_rows = {}
            for name, split in (info.splits or {}).items():
                num_rows[name] = split.num_examples
            known = (sorted(info.download_checksums or {}), num_rows)
        return xxhash.xxh3_128_hexdigest(json.dumps(known).encode())

    def text_of(self, row: Row, number: int) -> str | None:
        """Return the text of a document, or None if it cannot be used and is left out.

        Args:
            row: the row of the document in `dataset`.
            number: the number of the document in the data set, from 1.

        Raises:
            ValueError: if the document cannot be used, with its file and line, the cause and the
                fix.
        """
        try:
            return self._read(row)
        except Exception as error:  # a ValueError, or an error of the parser or the codec
            if self.skip_bad_rows:
                return None
            raise ValueError(
                f"{self.place(number)}: {explain(error)}: fix it, or leave such documents out "
                "with --skip_bad_rows"
            ) from None

    def place(self, number: int) -> str:
        """Return where a document is: its file, and its line if the file has lines.

        Args:
            number: the number of the document in the data set, from 1.
        """
        files = self.source.files
        if self.source.file_type == ".txt":
            return str(files[number - 1])
        if self.source.file_type != ".jsonl":
            return f"{self.source.prefix} {number}"
        for file in files:
            with open(file, encoding="latin-1") as lines:
                num_lines = sum(1 for _ in lines)
            if number <= num_lines:
                return f"{file}, line {number}"
            number -= num_lines
        raise IndexError(f"{self.source.name} has too few lines, by {number}")

    def _read(self, row: Row) -> str:
        """Return the text of a row, or raise a ValueError or an error of the parser."""
        if self.source.file_type == ".txt":
            return decode(row["text"])
        if self.source.file_type == ".jsonl":
            line = row["text"]
            if not line.strip():
                return ""
            row = parse_line(line)
        column = self.text_column
        if column not in row:
            raise ValueError(f"has the columns {list_columns(row)}; needs {column}")
        text = row[column]
        if not isinstance(text, str):
            raise ValueError(f"has no text in {column}: {str(text)[:MAX_SHOWN]}")
        text.encode()  # tokenizers refuse lone surrogates
        return text


def open_documents(
    args: HasDocumentArguments, *, evaluate: bool
) -> tuple[Documents, Documents | None]:
    """Return the documents to train on, and those to evaluate on or None.

    With --num_eval_documents, the first documents are held out to evaluate on. In addition to the
    files of `components.rows.open_splits`, .txt files are read, each as one document; if none is
    named after a split, all .txt files of a folder are used.
    """
    source = training_source(args.dataset_name, args)
    documents = require(load_documents(source, args), source)
    if args.num_eval_documents:
        held_out, documents = hold_out(documents, args.num_eval_documents)
        return documents, held_out if evaluate else None
    source = evaluation_source(args.dataset_name, args) if evaluate else None
    if source is None:
        return documents, None
    return documents, load_documents(source, args)


def load_documents(source: Source, args: HasDocumentArguments) -> Documents | None:
    """Return the documents of a source, or None if it has none and does not need any."""
    source = replace(source, files=find_document_files(source))
    load = load_stream if args.streaming else load_rows
    dataset: Any = load(source, [args.text_column])
    if source.is_required:
        dataset = require(dataset, source)
    if dataset is None:
        return None
    columns = columns_of_documents(dataset, source)
    if columns and args.text_column not in columns and not args.skip_bad_rows:
        problem = missing_columns(columns, args.text_column, "text")
        fail(Exit.DATA, f"{source.prefix} 1: {problem}")
    unread = tuple(name for name in columns if name != args.text_column)
    if args.text_column in (dataset.column_names or []):
        dataset = dataset.select_columns([args.text_column])  # others would cost time and memory
    return Documents(dataset, source, args.text_column, args.skip_bad_rows, unread=unread)


def find_document_files(source: Source) -> tuple[Path, ...]:
    """Return the files of a split: those named after it, or .txt files in a folder named after it.

    If the split is required and there are neither, these are all .txt files of the data set.
    """
    files = find_files(source.name, source.split, DOCUMENT_TYPES)
    if not files:
        files = tuple(sorted(Path(source.name, source.split).rglob("*.txt")))
    if not files and source.is_required:
        files = tuple(sorted(Path(source.name).rglob("*.txt")))
    return files


def columns_of_documents(dataset: Dataset | IterableDataset, source: Source) -> Sequence[str]:
    """Return the names of the columns; where each row has its own, those of the first row."""
    if source.file_type == ".txt":
        return []
    if source.file_type != ".jsonl" and dataset.column_names:
        return dataset.column_names
    first: Any = next(iter(dataset), {})
    if source.file_type != ".jsonl":
        return list(first)
    try:
        return list(parse_line(first["text"]))
    except ValueError:  # a bad line is reported when it is read
        return []


def hold_out(documents: Documents, number: int) -> tuple[Documents, Documents]:
    """Return the first documents and the remaining ones; end with 65 if none remain."""
    dataset = documents.dataset
    if isinstance(dataset, Dataset) and len(dataset) <= number:
        fail(
            Exit.DATA,
            f"{documents.source.name}: {len(dataset)} documents, and "
            f"--num_eval_documents {number} leaves none to train on",
        )
    held_out = replace(documents, dataset=dataset.take(number))
    return held_out, replace(documents, dataset=dataset.skip(number), num_before=number)
