# SPDX-License-Identifier: Apache-2.0
"""Documents as blocks of tokens, read ahead on one rank, and resumed where a run stopped.

Documents come in an order that follows from the seed, each with an end of sequence after it, and
are cut into blocks of equal length. Nothing is lost, and only the end of the last pass is padded. A
position is a few numbers, so that a resumed run skips what lies before it without reading it.
"""

import dataclasses
import json
import math
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from datasets import Dataset, IterableDataset

from core.batches import Plan, starts_of_batches
from core.data import (
    FILE_TYPES,
    Row,
    Source,
    decode,
    find_files,
    in_one_line,
    missing_columns,
    open_rows,
    open_sources,
    parse_line,
    tokenize_text,
)
from core.engine import timeout_of_groups

DOCUMENT_TYPES = (*FILE_TYPES, ".txt")  # each .txt file is one document
TOKENS, PLACES, NUMBERS = range(3)  # the rows of a block


# ---- Documents ----
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
    def size(self) -> int | None:
        """The number of documents, None if they can only be read in order."""
        return len(self.dataset) if isinstance(self.dataset, Dataset) else None

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
            ValueError: if the document cannot be used, with its place, the cause and the fix.
        """
        try:
            return self._read(row)
        except ValueError as error:
            if self.skip_bad_rows:
                return None
            advice = "fix it, or leave such documents out with --skip_bad_rows"
            raise ValueError(f"{self.place(number)}: {in_one_line(error)}: {advice}") from None

    def place(self, number: int) -> str:
        """Return where a document is, by its number from 1: its file, or "train.jsonl, line 7"."""
        if self.source.file_type == ".txt":
            return str(self.source.files[number - 1])
        return self.source.place(number)

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
            raise ValueError(f"has no text in {column}: {text!s:.80}")
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
    """Return the first documents and the remaining ones."""
    dataset = documents.dataset
    held_out = replace(documents, dataset=dataset.take(number))
    return held_out, replace(documents, dataset=dataset.skip(number), num_before=number)


@dataclass(frozen=True)
class Position:
    """A place in the text.

    Attributes:
        passes: the number of complete passes over all documents.
        document: the number of documents that are done in this pass, in its order.
        token: the number of tokens that are done of the next document.
        reader: the state of a streamed data set at the start of the shuffled window; None for the
            start of the data set.
        left_out: the number of documents so far that could not be used.
    """

    passes: int = 0
    document: int = 0
    token: int = 0
    reader: dict[str, Any] | None = None
    left_out: int = 0


START = Position()
Numbered = tuple[int, Any, Position]  # number of a document from 1, its row, and where it begins
PlacedBlock = tuple[torch.Tensor, Position]  # a block, and the position after it


# ---- Documents in order ----
def read_documents(
    documents: Documents,
    start: Position,
    passes: float,
    seed: int,
    buffer_size: int,
) -> Iterator[Numbered]:
    """Yield document after document from a position, in another order in each pass.

    All documents are shuffled as a whole or, if they can only be streamed, window by window. The
    order follows from the seed, so that a position is found without what lies before it.

    Args:
        passes: the number of passes over all documents; math.inf for no end.
        buffer_size: the number of documents in a window of a stream.
    """
    position = start
    while position.passes < passes:
        if isinstance(documents.dataset, Dataset):
            yield from read_indexed_pass(documents, position, seed)
        else:
            yield from read_streamed_pass(documents, position, seed, buffer_size)
        position = Position(passes=position.passes + 1, left_out=position.left_out)


def read_indexed_pass(documents: Documents, start: Position, seed: int) -> Iterator[Numbered]:
    """Yield the rest of the documents of a pass over a data set, shuffled as a whole."""
    dataset: Any = documents.dataset
    order = np.random.default_rng((seed, start.passes, 0)).permutation(len(dataset))
    position = start
    for place in range(start.document, len(dataset)):
        chosen = int(order[place])
        position = replace(position, document=place)
        yield documents.num_before + chosen + 1, dataset[chosen], position
        position = replace(position, token=0)


def read_streamed_pass(
    documents: Documents, start: Position, seed: int, buffer_size: int
) -> Iterator[Numbered]:
    """Yield the rest of the documents of a pass over a stream, shuffled window by window."""
    stream: Any = documents.dataset
    stream.load_state_dict(start.reader)  # With None it starts at the beginning.
    reading = iter(stream)
    before = start.document // buffer_size * buffer_size  # Documents before the window
    position = start
    window = list(islice(reading, buffer_size))
    while window:
        order = np.random.default_rng((seed, start.passes, before)).permutation(len(window))
        for place in range(position.document - before, len(window)):
            chosen = int(order[place])
            position = replace(position, document=before + place)
            yield documents.num_before + before + chosen + 1, window[chosen], position
            position = replace(position, token=0)
        before += len(window)
        position = replace(position, document=before, reader=stream.state_dict())
        window = list(islice(reading, buffer_size))


# ---- Blocks ----
def cut_blocks(
    numbered: Iterable[Numbered], documents: Documents, tokenizer: Any, max_length: int
) -> Iterator[PlacedBlock]:
    """Yield blocks of max_length tokens, each with the position of the token after it.

    A block is [3, max_length + 1] and has for each token: the token itself, of which the last is
    only predicted, since the next block begins with it; its place in its document's part of the
    block; the number of its document, which is 0 after the end of the data.

    Raises:
        ValueError: a document cannot be used: its file and line, the cause and the fix.
    """
    block = torch.zeros(3, max_length + 1, dtype=torch.int32)
    filled = 0
    left_out = 0
    position = START
    for number, row, position in numbered:
        text = documents.text_of(row, number)
        if text is None:
            left_out += 1
        tokens = tokenize_document(text, tokenizer)
        start = position.token
        while start < len(tokens):
            part = tokens[start : start + max_length + 1 - filled]
            end = filled + len(part)
            block[TOKENS, filled:end] = part
            block[PLACES, filled:end] = torch.arange(len(part))
            block[NUMBERS, filled:end] = number
            filled = end
            start += len(part)
            if filled > max_length:
                start -= 1  # The next block begins with the last token of this one.
                yield block, replace(position, token=start, left_out=position.left_out + left_out)
                block = torch.zeros_like(block)
                filled = 0
    if filled:
        end_of_data = Position(passes=position.passes + 1, left_out=position.left_out + left_out)
        yield block, end_of_data


def tokenize_document(text: str | None, tokenizer: Any) -> torch.Tensor:
    """Return the tokens of a document and an end of sequence, [tokens]; none if it has no text."""
    if text is None or not text.strip():
        return torch.zeros(0, dtype=torch.int32)
    tokens = tokenize_text(text, tokenizer)
    end = tokenizer.eos_token_id
    if end is not None and tokens[-1:] != [end]:
        tokens.append(end)
    return torch.tensor(tokens, dtype=torch.int32)


def count_tokens(block: torch.Tensor) -> int:
    """Return how many tokens of a block a model reads: all but the last one and padding."""
    return int((block[NUMBERS, :-1] > 0).sum())


# ---- All ranks ----
class BlockStream:
    """The blocks of a run, step by step. One rank reads ahead in a thread and sends them to all.

    Otherwise each rank would have to tokenize all text to know where its own blocks begin.

    Attributes:
        position: the position after the blocks of the last step.
    """

    def __init__(self, documents: Documents, tokenizer: Any, plan: Plan, passes: float) -> None:
        """Read from the beginning.

        Args:
            plan: of batches whose lines are blocks.
            passes: the number of passes over all documents; math.inf for no end.
        """
        self.position = START
        self._documents = documents
        self._tokenizer = tokenizer
        self._plan = plan
        self._passes = passes
        self._blocks: Iterator[PlacedBlock] = iter(())
        self._ahead: Future | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._group: Any = None
        if plan.layout.accelerator.is_main_process:
            self._thread = ThreadPoolExecutor(1)
        if plan.layout.accelerator.num_processes > 1:
            # gloo uses TCP; GLOO_SOCKET_IFNAME names the interface between several hosts.
            timeout = timeout_of_groups(plan.args.ddp_timeout)
            self._group = torch.distributed.new_group(backend="gloo", timeout=timeout)

    @property
    def epoch(self) -> float:
        """The number of complete passes, plus the share of this one if it is known."""
        if self._documents.size is None:
            return float(self.position.passes)
        return self.position.passes + self.position.document / self._documents.size

    def describe(self) -> str:
        """Return how much of the data was read, and how much of it could not be used."""
        position = self.position
        read = f"{position.passes} whole passes and {position.document} documents"
        return f"Read {read}; {position.left_out} documents could not be used and were left out"

    def state_dict(self) -> dict[str, Any]:
        """Return the position, as JSON."""
        return dataclasses.asdict(self.position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position. Call it before the first step."""
        passes = state.get("passes", state.get("pass"))  # As earlier versions call it
        known = {name: state[name] for name in state if name != "pass"}
        self.position = Position(**known | {"passes": passes})

    def next_step(self, is_last: bool) -> list[list[torch.Tensor]]:
        """Return the blocks of this rank's micro-batches. Every rank takes part.

        Args:
            is_last: whether this is the last step, after which nothing is read ahead.

        Raises:
            ValueError: on every rank, if a document cannot be used.
        """
        sent: list[Any] = [[], ""]
        if self._thread is not None:
            sent = self._read(self._thread, is_last)
        if self._group is not None:
            torch.distributed.broadcast_object_list(sent, group=self._group)
        dealt, problem = sent
        if problem:
            raise ValueError(problem)
        _, self.position = dealt[-1]
        if is_last and self._passes < math.inf:  # The last token, already predicted, may be left
            self.position = Position(int(self._passes), left_out=self.position.left_out)
        size = self._plan.args.per_device_train_batch_size
        starts = starts_of_batches(self._plan.rows_per_step, size, self._plan.layout)
        return [[block for block, _ in dealt[start : start + size]] for start in starts]

    def _read(self, thread: ThreadPoolExecutor, is_last: bool) -> list[Any]:
        """Return the placed blocks of a step, or why there are none, and begin to read the next."""
        args = self._plan.args
        if self._ahead is None:
            ordered = read_documents(
                self._documents, self.position, self._passes, args.seed, args.shuffle_buffer_size
            )
            self._blocks = cut_blocks(ordered, self._documents, self._tokenizer, args.max_length)
            self._ahead = thread.submit(self._take_step)
        try:
            blocks = self._ahead.result()
        except ValueError as error:
            return [[], str(error)]
        if not is_last:
            self._ahead = thread.submit(self._take_step)
        return [blocks, ""]

    def _take_step(self) -> list[PlacedBlock]:
        """Return the blocks of the next step on all ranks; fewer at the end of the last pass."""
        return list(islice(self._blocks, self._plan.rows_per_step))


def first_blocks(
    documents: Documents, tokenizer: Any, max_length: int, number: int
) -> list[torch.Tensor]:
    """Return the first blocks of documents in their own order, for evaluation for example."""
    numbered = ((place, row, START) for place, row in enumerate(documents.dataset, 1))
    blocks = cut_blocks(numbered, documents, tokenizer, max_length)
    return [block for block, _ in islice(blocks, number)]
