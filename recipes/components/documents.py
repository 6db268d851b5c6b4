# SPDX-License-Identifier: Apache-2.0
"""Documents to pretrain on, which may be too many to be prepared before training."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import xxhash
from datasets import Dataset, IterableDataset

from core.data import (
    FILE_TYPES,
    MAX_SHOWN,
    Row,
    Source,
    decode,
    find_files,
    in_one_line,
    missing_columns,
    open_rows,
    open_sources,
    parse_line,
)
from core.exits import Exit, fail

DOCUMENT_TYPES = (*FILE_TYPES, ".txt")  # each .txt file is one document


@dataclass(frozen=True)
class Documents:
    """The documents of a split, numbered from 1 over all files of the data set.

    Attributes:
        dataset: the rows of the documents; with --streaming, they can only be read in order.
        source: where the documents are.
        text_column: the column with the text.
        skip_bad_rows: whether documents that cannot be used are left out.
        num_before: the number of documents before these, which are held out.
    """

    dataset: Dataset | IterableDataset
    source: Source
    text_column: str
    skip_bad_rows: bool
    num_before: int = 0

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
        except ValueError as error:
            if self.skip_bad_rows:
                return None
            raise ValueError(
                f"{self.place(number)}: {in_one_line(error)}: fix it, or leave such documents out "
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
        """Return the text of a row, or raise a ValueError."""
        if self.source.file_type == ".txt":
            return decode(row["text"])
        if self.source.file_type == ".jsonl":
            parsed = parse_line(row["text"])
            if parsed is None:
                return ""
            row = parsed
        column = self.text_column
        if column not in row:
            raise ValueError(missing_columns(row, column, "text"))
        text = row[column]
        if not isinstance(text, str):
            raise ValueError(f"has no text in {column}: {str(text)[:MAX_SHOWN]}")
        text.encode()  # tokenizers refuse lone surrogates
        return text


def open_documents(args: Any) -> tuple[Documents, Documents | None]:
    """Return the documents to train on, and those to evaluate on or None.

    With --num_eval_documents, the first documents are held out to evaluate on. In addition to the
    files of `core.data.open_rows`, .txt files are read, each as one document; if none is named
    after a split, all .txt files of a folder are used.
    """
    train, test = open_sources(args, partial(open_texts, args=args))
    documents = documents_of(train[0], args)
    if args.num_eval_documents:
        held_out, documents = hold_out(documents, args.num_eval_documents)
        return documents, held_out if args.eval_strategy != "no" else None
    return documents, documents_of(test[0], args) if test else None


def open_texts(
    name: str, config: str | None, split: str, is_required: bool, args: Any
) -> Source | None:
    """Return the rows of a split, or None if it is empty and not required.

    Without files that are named after it, these are the .txt files in a folder named after it or,
    if it is required, all .txt files of the data set.
    """
    files = find_files(name, split, DOCUMENT_TYPES)
    if not files:
        files = tuple(sorted(Path(name, split).rglob("*.txt")))
    if not files and is_required:
        files = tuple(sorted(Path(name).rglob("*.txt")))
    return open_rows(
        name, config, split, is_required, [args.text_column], files, streaming=args.streaming
    )


def documents_of(source: Source, args: Any) -> Documents:
    """Return the documents of a source."""
    dataset: Any = source.dataset
    if args.text_column in (dataset.column_names or []):
        dataset = dataset.select_columns([args.text_column])  # others would cost time and memory
    return Documents(dataset, source, args.text_column, args.skip_bad_rows)


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
