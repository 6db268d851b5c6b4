# SPDX-License-Identifier: Apache-2.0
"""Rows of a file, a folder or a hub id, prepared by a function of the recipe.

A row that cannot be used is reported with its file, its line, the cause and the fix. Prepared rows
are cached: components/fingerprints.py makes their key.
"""

import contextlib
import copy
import functools
import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import xxhash

from components.bad_rows import (
    NUM_NAMED,
    explain,
    explain_cause,
    report_all,
    report_some,
    without_blank,
)
from components.data_files import Source, find_files, has_files_of, load_rows, parse_line
from components.fingerprints import prepared_fingerprint
from components.full_cache import end_if_cache_is_full
from core.data import Row, TrackedRow, note_unread
from core.exits import Exit, fail

if TYPE_CHECKING:
    from datasets import Dataset

T = TypeVar("T")
Prepare = Callable[[Row], dict[str, Any]]
# Columns of rows while they are prepared
PROBLEM = "problem"  # why a row cannot be used, "" if it can
UNREAD = "not_read"  # the columns and message keys that nothing has read, as JSON
TRUNCATED = "truncated"  # whether `prepare` has cut the row
WHOLE_LENGTH = "whole_length"  # the tokens of a row with the end that `prepare` has cut off
REWRITTEN = "rewritten"  # number of answers that are not trained on, as the chat template rewrites
# The number of the row, from 1. It becomes `row`, which a file may have in another type.
NUMBER = "number_in_file"
TEMPORARY = (PROBLEM, UNREAD, WHOLE_LENGTH, REWRITTEN)
NOTABLE_SHARE = 0.05  # A larger share of truncated rows is a warning.
# Rows are prepared and written in this many batches, unless one had fewer rows or more bytes.
NUM_BATCHES = 1_000
FEWEST_ROWS_OF_BATCH = 1_000
MOST_BYTES_OF_BATCH = 32 << 20  # The bytes are those of the rows before they are prepared.


class HasDataArguments(Protocol):
    """What has the arguments of components.arguments.DataArguments.

    It is a protocol, so that documents.py and images.py can ask for arguments of one recipe too.
    """

    @property
    def dataset_config(self) -> str | None: ...
    @property
    def dataset_train_split(self) -> str: ...
    @property
    def dataset_test_split(self) -> str: ...
    @property
    def eval_dataset_name(self) -> str | None: ...
    @property
    def eval_split(self) -> float: ...
    @property
    def skip_bad_rows(self) -> bool: ...


class HasPreparationArguments(HasDataArguments, Protocol):
    """What also has those of PreparationArguments, and the seed of TrainingArguments."""

    @property
    def dataset_num_proc(self) -> int | None: ...
    @property
    def seed(self) -> int: ...


@dataclass(frozen=True)
class Split:
    """The rows of one split as they are in their files.

    Attributes:
        dataset: the rows; those of a .jsonl file are still lines, in the column `text`.
        source: where the rows are.
        is_training: whether the rows are trained on rather than evaluated on.
        unread: the columns that were dropped because nothing reads them.
    """

    dataset: "Dataset"
    source: Source
    is_training: bool
    unread: tuple[str, ...] = ()

    def class_names(self, column: str) -> list[str] | None:
        """Return the names of the classes that a column, or its lists, number; None without any."""
        feature = self.dataset.features.get(column)
        feature = getattr(feature, "feature", feature)  # A list has its items' feature.
        return getattr(feature, "names", None)


@dataclass(frozen=True)
class Rows:
    """The prepared rows of a split, in numpy's format.

    Attributes:
        dataset: the columns that the recipe's function returned, except `whole_length`, and
            `row`: the number of the row in its file, from 1.
        notes: a line of the start summary: "2260, 3 truncated to --max_length, 0 left out".
        prefix: the text before the number of a row in messages: "train.jsonl, line".
        warning: a warning of the start summary, or "".
    """

    dataset: "Dataset"
    notes: str
    prefix: str
    warning: str = ""

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> np.ndarray:
        """Return the values of a column: [rows]."""
        return np.asarray(self.dataset[name][:])

    @property
    def lengths(self) -> np.ndarray:
        """The number of tokens of each row, the column `length`: [rows]."""
        return self.column("length")

    @property
    def fingerprint(self) -> str:
        """A hash of all rows in their order: a resumed run must read the rows it began with."""
        return xxhash.xxh3_128_hexdigest(self.column("hash").data)

    def largest_token(self, tokenizer: Any) -> int:
        """Return the largest token of the rows (column `largest`) and of what pads them."""
        return max(tokenizer.pad_token_id, int(self.column("largest").max()))

    def place(self, index: int) -> str:
        """Return where the row at an index, counted from 0, comes from: "train.jsonl, line 7"."""
        return f"{self.prefix} {self.dataset[index]['row']}"


def describe_rows(train_rows: Rows, eval_rows: Rows | None) -> dict[str, str]:
    """Return the start summary's lines: {"train rows": notes, "eval rows": notes}.

    Warnings about the rows to train on, and about rows of both kinds, are added as "warning".
    """
    notes = {"train rows": train_rows.notes, "eval rows": "none"}
    warnings = [train_rows.warning]
    if eval_rows is not None:
        notes["eval rows"] = eval_rows.notes
        warnings.append(warn_of_copies(train_rows, eval_rows))
    if any(warnings):
        notes["warning"] = "\n".join(filter(None, warnings))
    return notes


def warn_of_copies(train_rows: Rows, eval_rows: Rows) -> str:
    """Return a warning if rows to evaluate on equal rows to train on, as prepared, or ""."""
    is_copy = np.isin(eval_rows.column("hash"), train_rows.column("hash"))
    if not is_copy.any():
        return ""
    number = f"{is_copy.sum()} of the {len(eval_rows)} held-out rows are trained on too"
    return f"{number}: an evaluation is better than on new rows; leave such copies out of the data"


def longest_row(train_rows: Rows, eval_rows: Rows | None, column: str = "length") -> int:
    """Return the number of tokens of the longest row, also of those to evaluate on.

    Args:
        column: the one with the numbers of tokens.
    """
    splits = [rows for rows in (train_rows, eval_rows) if rows is not None]
    return max(int(rows.column(column).max()) for rows in splits)


# ---- Splits ----
def open_splits(
    name: str, args: HasDataArguments, *, evaluate: bool, text_columns: Sequence[str] = ()
) -> tuple[Split, Split | None]:
    """Return the split of a data set to train on and the one to evaluate on.

    The latter is None if `evaluate` is false, with --eval_split, or if no --eval_dataset_name is
    given and the data set has no --dataset_test_split. The process ends with 65 if a file cannot
    be read or has no rows, and with 69 if the hub cannot be reached.

    Args:
        name: of the data set, as --dataset_name gives it.
        text_columns: columns that are text in a CSV file even where they look like numbers,
            besides `components.data_files.TEXT_COLUMNS`.
    """
    source = training_source(name, args)
    train_split = Split(require(load_rows(source, text_columns), source), source, is_training=True)
    source = evaluation_source(name, args) if evaluate else None
    if source is None:
        return train_split, None
    dataset = load_rows(source, text_columns)
    if source.is_required:
        dataset = require(dataset, source)
    if dataset is None:
        return train_split, None
    return train_split, Split(dataset, source, is_training=False)


def training_source(name: str, args: HasDataArguments) -> Source:
    """Return where the rows of a data set to train on are."""
    split = args.dataset_train_split
    return Source(name, args.dataset_config, split, find_files(name, split), is_required=True)


def evaluation_source(name: str, args: HasDataArguments) -> Source | None:
    """Return where the rows to evaluate on are, or None if local files have none.

    There is no such place with --eval_split: `hold_out_rows` draws them from those to train on.
    """
    if args.eval_split:
        return None
    split = args.dataset_test_split
    if args.eval_dataset_name:
        name = args.eval_dataset_name
        return Source(name, None, split, find_files(name, split), is_required=True)
    if Path(name).exists() and not has_files_of(name, split):
        return None
    return Source(name, args.dataset_config, split, find_files(name, split), is_required=False)


def require(found: T | None, source: Source) -> T:
    """Return what was found in a source; end with 65 if that is None."""
    if found is None:
        fail(Exit.DATA, f"{source.name}: no rows in split {source.split}")
    return found


# ---- Rows ----
def prepare_rows(
    split: Split,
    prepare: Prepare,
    args: HasPreparationArguments,
    *,
    limits: Sequence[str] = ("max_length",),
) -> Rows:
    """Return the rows of a split as `prepare` makes them, without those that cannot be used.

    Rows that cannot be used end the process with 65 and are named, unless --skip_bad_rows leaves
    them out. Without a single usable row the process always ends with 65.

    Args:
        prepare: a function of one row, or a `functools.partial` of one. It returns the columns of
            the prepared row, and raises a ValueError if the row cannot be used, whose text
            continues "train.jsonl, line 7: ", as in "has no answer to train on". `Rows`
            reads the columns `length`, `largest`, the largest token, and `hash`, of all that is
            trained on. A column `truncated` is counted in the notes; with a column
            `whole_length` beside it, truncating many rows is a warning.
        limits: the arguments to which `prepare` truncates, for the notes.
    """
    attempted = attempt_rows(split, prepare, args.dataset_num_proc)
    return keep_usable(attempted, split, limits, skip_bad_rows=args.skip_bad_rows)


def keep_usable(
    attempted: "Dataset", split: Split, limits: Sequence[str], *, skip_bad_rows: bool
) -> Rows:
    """Return the rows of a split that can be used, of all as `attempt` makes them.

    Args:
        limits, skip_bad_rows: as in `prepare_rows`, which ends as this does.
    """
    source = split.source
    rows: Any = attempted
    num_rows = len(rows)
    unusable = find_unusable(rows)
    bad = without_blank(unusable)
    if bad and not skip_bad_rows:
        report = report_some(bad, source.prefix, source.name, num_rows)
        fail(Exit.DATA, *report)
    if unusable:  # Only then, since a selection makes every later access slower.
        rows = rows.select(np.delete(np.arange(num_rows), np.array(list(unusable)) - 1))

    notes = note_counts(rows, len(bad), limits)
    if split.is_training:  # Rows to evaluate on usually have the same columns.
        notes += note_unread(count_unread(split, rows), len(rows))
    warning = warn_of_cut_rows(rows, limits)
    temporary = [name for name in TEMPORARY if name in rows.column_names]
    rows = rows.remove_columns(temporary).rename_column(NUMBER, "row").with_format("numpy")
    return Rows(rows, notes, source.prefix, warning)


def attempt_rows(split: Split, prepare: Prepare, num_proc: int | None) -> "Dataset":
    """Return all rows of a split as `attempt` makes them, from the cache if it has them."""
    dataset: Any = split.dataset
    fingerprint = prepared_fingerprint(dataset._fingerprint, prepare, attempt)
    prepare = copy.deepcopy(prepare)  # A tokenizer keeps the truncation of its last call.
    with reading(split.source):
        first = first_usable_row(split, prepare)
        is_line = split.source.unit == "line"
        attempt_all: Callable = attempt
        if is_line:  # Other rows are decoded one by one, as one of them may not decode.
            attempt_all = attempt_lines
        verb = "Tokenizing" if TRUNCATED in first else "Checking"
        rows_at_once = rows_per_batch(dataset)
        return dataset.map(
            functools.partial(attempt_all, prepare=prepare, source=split.source, instead=first),
            with_indices=True,
            batched=is_line,
            batch_size=rows_at_once,
            writer_batch_size=rows_at_once,
            remove_columns=dataset.column_names,
            num_proc=num_proc,
            new_fingerprint=fingerprint,
            desc=f"{verb} {split.source.name}",
        )


def rows_per_batch(dataset: "Dataset") -> int:
    """Return how many rows of a data set are prepared and written together.

    datasets reads the description of each batch of a file when it opens it, on every rank, which
    takes 6 KB of memory. So large data sets have larger batches, as far as memory allows.
    """
    num_rows = len(dataset)
    bytes_per_row = dataset.data.nbytes / num_rows
    fitting = int(MOST_BYTES_OF_BATCH / max(bytes_per_row, 1))
    return max(FEWEST_ROWS_OF_BATCH, min(num_rows // NUM_BATCHES, fitting))


def first_rows(split: Split) -> list[Row]:
    """Return the first thousand rows of a split as they are, without lines that are no rows."""
    rows: list[Row] = []
    dataset: Any = split.dataset
    for row in dataset.take(FEWEST_ROWS_OF_BATCH):
        with contextlib.suppress(ValueError):
            rows.append(parse_line(row["text"]) if split.source.unit == "line" else row)
    return rows


def find_unusable(rows: "Dataset") -> dict[int, str]:
    """Return {number of a row, from 1: why it cannot be used} of rows as `attempt` makes them."""
    return {number: problem for number, problem in enumerate(rows[PROBLEM][:], 1) if problem}


@contextlib.contextmanager
def reading(source: Source) -> Generator[None]:
    """End with 65 if the rows of a source cannot be read, or with 73 if the cache is full."""
    try:
        yield
    except Exception as error:  # Each reader and writer raises exceptions of its own.
        if hasattr(error, "__notes__"):  # It is of what prepares the rows, see `attempt`.
            raise
        end_if_cache_is_full(source.name, error, of_rows=True)
        fail(Exit.DATA, f"{source.name}: {explain_cause(error, source.name)}")


def first_usable_row(split: Split, prepare: Prepare) -> dict[str, Any]:
    """Return the first row that can be used, as `attempt` makes it; end with 65 if none can."""
    source = split.source
    problems = {}
    for index in range(len(split.dataset)):
        try:
            row = split.dataset[index]
        except Exception as error:  # The row cannot be decoded.
            problems[index + 1] = explain(error)
            continue
        attempted = attempt(row, index, prepare, source, instead={})
        if not attempted[PROBLEM]:
            return attempted
        problems[index + 1] = attempted[PROBLEM]
    problems = without_blank(problems) or problems
    report = report_all(problems, source.prefix, source.name)
    fail(Exit.DATA, *report)


def attempt_lines(
    batch: Mapping[str, Sequence[str]],
    indices: Sequence[int],
    prepare: Prepare,
    source: Source,
    instead: dict[str, Any],
) -> dict[str, list[Any]]:
    """Return many lines of a .jsonl file as `attempt` makes them, as {column: values}."""
    rows = []
    for text, index in zip(batch["text"], indices, strict=True):
        rows.append(attempt({"text": text}, index, prepare, source, instead))
    return {name: [row[name] for row in rows] for name in rows[0]}


def attempt(
    row: Row, index: int, prepare: Prepare, source: Source, instead: dict[str, Any]
) -> dict[str, Any]:
    """Return a row as `prepare` makes it, with the columns PROBLEM, UNREAD and NUMBER.

    Only a ValueError is a problem of the row. Any other exception is a fault of `prepare`, and gets
    the place of the row as a note.

    Args:
        index: the place of the row in its file, from 0.
        instead: the columns of a row that cannot be used, until it is left out. They are needed
            because all rows of a table have the same columns, of the same types.
    """
    try:
        tracked = TrackedRow(parse_line(row["text"]) if source.unit == "line" else row)
        prepared = prepare(tracked)
    except ValueError as error:
        return {**instead, PROBLEM: explain(error), UNREAD: "[]", NUMBER: index + 1}
    except Exception as error:
        error.add_note(f"{source.prefix} {index + 1}")
        raise
    columns = {name: without_boxes(value) for name, value in prepared.items()}
    return {**columns, PROBLEM: "", UNREAD: json.dumps(tracked.unread()), NUMBER: index + 1}


def without_boxes(value: Any) -> Any:
    """Return a list of whole numbers, such as tokens, as an array, and anything else unchanged.

    datasets looks at each item of a list before it writes it, which takes longer than to render a
    chat template.
    """
    if isinstance(value, list) and value and type(value[0]) is int:
        return np.array(value, dtype=np.int32)
    return value


def hold_out_rows(
    rows: Rows, args: HasPreparationArguments, *, evaluate: bool
) -> tuple[Rows, Rows | None]:
    """Return the rows to train on, and those that --eval_split holds out to evaluate on or None.

    Which ones are held out depends on nothing but --seed and the number of rows, so that each rank
    and a resumed run find the same. They are held out even if `evaluate` is false: the rows to
    train on do not depend on it. Ends with 65 if no row to train on remains.
    """
    if not args.eval_split:
        return rows, None
    number = int(args.eval_split)
    if args.eval_split < 1:
        number = max(1, round(args.eval_split * len(rows)))
    if number >= len(rows):
        fail(
            Exit.DATA,
            f"--eval_split {args.eval_split:g}: leaves none of the {len(rows)} rows to train on",
        )
    drawn = np.random.default_rng(args.seed).permutation(len(rows))
    dataset: Any = rows.dataset  # datasets annotates its methods as if it were a DatasetDict too
    train_rows = replace(
        rows,
        dataset=dataset.select(np.sort(drawn[number:])),
        notes=f"{rows.notes}; {number} of these are held out (--eval_split)",
    )
    if not evaluate:
        return train_rows, None
    held_out = replace(
        rows,
        dataset=dataset.select(np.sort(drawn[:number])),
        notes=f"{number} held out of the training rows (--eval_split)",
    )
    return train_rows, held_out


def leave_out(rows: Rows, problems: Mapping[int, str], skip_bad_rows: bool, reason: str) -> Rows:
    """Return the rows without those that turn out to be unusable once all were read.

    Ends with 65, naming the first of them, unless --skip_bad_rows leaves them out and some remain.

    Args:
        problems: {index of a row, from 0: what continues "train.jsonl, line 7: "}.
        reason: what they are left out for, in the notes: "label".
    """
    some_remain = len(problems) < len(rows)
    if not skip_bad_rows or not some_remain:
        named = [f"{rows.place(i)}: {problems[i]}" for i in list(problems)[:NUM_NAMED]]
        advice = "fix them"
        if some_remain:
            advice += ", or leave them out with --skip_bad_rows"
        count = "1 row" if len(problems) == 1 else f"{len(problems)} rows"
        fail(Exit.DATA, *named, f"{count} cannot be used: {advice}")
    kept = np.delete(np.arange(len(rows)), list(problems))
    notes = f"{rows.notes}, {len(problems)} more for their {reason}"
    dataset: Any = rows.dataset  # datasets annotates its methods as if it were a DatasetDict too
    return replace(rows, dataset=dataset.select(kept), notes=notes)


def note_counts(rows: "Dataset", num_left_out: int, limits: Sequence[str]) -> str:
    """Return the numbers of rows, of truncated ones and of those left out, for the summary."""
    notes = [str(len(rows))]
    if TRUNCATED in rows.column_names:
        flags = " and ".join(f"--{limit}" for limit in limits)
        notes.append(f"{sum(rows[TRUNCATED][:])} truncated to {flags}")
    notes.append(f"{num_left_out} left out")
    num_rewritten = 0
    if REWRITTEN in rows.column_names:
        num_rewritten = sum(rows[REWRITTEN][:])
    if num_rewritten:
        notes.append(
            f"{num_rewritten} answers before the last are not trained on, since the chat template "
            "rewrites them (see --chat_template)"
        )
    return ", ".join(notes)


def warn_of_cut_rows(rows: "Dataset", limits: Sequence[str]) -> str:
    """Return a warning if many rows have lost their end, or "".

    Args:
        limits: as in `prepare_rows`.
    """
    if WHOLE_LENGTH not in rows.column_names:
        return ""
    num_cut = sum(rows[TRUNCATED][:])
    if num_cut <= NOTABLE_SHARE * len(rows):
        return ""
    flags = " and ".join(f"--{limit}" for limit in limits)
    return (
        f"{num_cut / len(rows):.0%} of the training rows lose their end, from which the model "
        f"would learn to stop: {flags} {max(rows[WHOLE_LENGTH][:])} fits all of them"
    )


def count_unread(split: Split, rows: "Dataset") -> dict[str, int]:
    """Return {column or message key that nothing reads: number of rows that have it}."""
    counts = Counter(dict.fromkeys(split.unread, len(rows)))
    for names, number in Counter(rows[UNREAD][:]).items():
        for name in json.loads(names):
            counts[name] += number
    return counts
