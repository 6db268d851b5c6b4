# SPDX-License-Identifier: Apache-2.0
"""Rows of files, folders or hub ids: checked, prepared once, held out and mixed.

A row that cannot be used is named with its file, its line, the cause and the fix.
"""

import copy
import functools
import glob
import json
import sys
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import datasets
import numpy as np
import xxhash
from datasets.fingerprint import Hasher

from core.exits import Exit, fail
from core.stop import CANNOT_WRITE

Row = Mapping[str, Any]  # {name of a column: its value}
Prepare = Callable[[Row], dict[str, Any]]
IGNORED = -100  # the label of a token that is not trained on; torch's cross_entropy leaves it out
NUM_NAMED = 3  # rows that a message names
# A column of tools is often JSON as text, so empty JSON counts too
EMPTY_VALUES = (None, "", [], {}, "null", "[]", "{}")
FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")
# Columns that rows have while they are prepared. The first one becomes `row`, which a file may have
# in another type.
NUMBER = "number_in_file"
UNREAD = "not_read"  # the columns that nothing has read, as JSON


# ---- One row ----
class TrackedRow(UserDict[str, Any]):
    """A row that remembers which of its columns were read, so that the others can be reported."""

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.columns_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.columns_read.add(key)
        return super().__getitem__(key)

    def unread(self) -> list[str]:
        """Return the columns that nothing read."""
        return [name for name in self.data if name not in self.columns_read]


def name_classes(value: Any, names: Sequence[str]) -> Any:
    """Return the name of a class, or a list of them, from its number; None if it has none (-1)."""
    if isinstance(value, list):
        return [name_classes(one, names) for one in value]
    return names[value] if value in range(len(names)) else None


def rename_columns(row: Row, columns: Mapping[str, str]) -> Row:
    """Return a row with its columns under the names of their roles; their own names have None.

    Args:
        columns: {role: name of a column}, as --columns gives them.

    Raises:
        ValueError: if the row lacks one of these columns.
    """
    for role, column in columns.items():
        if column not in row:
            problem = f"has no column {column}, which --columns names as {role}"
            raise ValueError(f"{problem}: it has {list_columns(row)}")
    named = {role: row[column] for role, column in columns.items()}
    # All other columns are looked up in the row itself, which tells those that nothing reads
    maps: list[Any] = [named, dict.fromkeys(columns.values()), row]
    return ChainMap(*maps)


def is_empty(value: object) -> bool:
    """Return whether a value counts as missing; readers fill what a row lacks with null."""
    if isinstance(value, str):
        value = value.strip()
    return value in EMPTY_VALUES


def list_columns(names: Iterable[str]) -> str:
    """Return names of columns as text, for a message."""
    return ", ".join(names)[:80] or "none"


def missing_columns(names: Iterable[str], needed: str, *roles: str) -> str:
    """Return what is wrong with a row that lacks columns, and what to do.

    Args:
        names: the columns that it has.
        needed: those that were looked for.
        roles: their roles for --columns.
    """
    flags = " ".join(f"{role}=COLUMN" for role in roles)
    return f"has the columns {list_columns(names)}; needs {needed}: name yours by --columns {flags}"


def tokenize_text(text: str, tokenizer: Any) -> list[int]:
    """Return the tokens of a text, with what the tokenizer puts before it, once.

    Some also append an end (add_eos_token): a prompt would be over, and an answer would have two.
    """
    encoded = tokenizer(text, verbose=False, return_special_tokens_mask=True)
    tokens, is_added = encoded["input_ids"], encoded["special_tokens_mask"]
    if 0 not in is_added:  # There is no text.
        return [token for token in tokens[:1] if token == tokenizer.bos_token_id]
    start = is_added.index(0)
    end = len(tokens) - is_added[::-1].index(0)
    if tokens[:start] == tokens[start : 2 * start]:  # The text has them too.
        return tokens[start:end]
    return tokens[:end]


def hash_of_row(content: bytes) -> int:
    """Return a hash of 63 bits (xxh3), since datasets stores signed 64-bit integers."""
    return xxhash.xxh3_64_intdigest(content) >> 1


# ---- Sources ----
@dataclass(frozen=True)
class Source:
    """The rows of one split as they are; those of a .jsonl file are lines, in the column `text`.

    Attributes:
        name: the data set as the user named it: a file, a folder or a hub id.
        files: of the split, all of one type; none of a hub id, or where datasets finds the files.
        dataset: the rows.
    """

    name: str
    files: tuple[Path, ...]
    dataset: Any

    @property
    def file_type(self) -> str:
        """The suffix of the files, "" without any."""
        return self.files[0].suffix if self.files else ""

    def place(self, number: int) -> str:
        """Return where a row is, by its number in the source, from 1: "train.jsonl, line 7"."""
        if self.file_type != ".jsonl":
            return f"{self.files[0] if len(self.files) == 1 else self.name}, row {number}"
        for file in self.files[:-1]:
            with file.open(encoding="latin-1") as lines:
                count = sum(1 for _ in lines)
            if number <= count:
                return f"{file}, line {number}"
            number -= count
        return f"{self.files[-1]}, line {number}"

    @property
    def class_names(self) -> dict[str, list[str]]:
        """The names of the classes that a column, or its lists, number: {column: names}."""
        found = {}
        for column, feature in self.dataset.features.items():
            feature = getattr(feature, "feature", feature)  # A list has its items' feature.
            if isinstance(feature, datasets.ClassLabel):
                found[column] = feature.names
        return found


def open_sources(
    args: Any, open_source: Callable[..., Source | None]
) -> tuple[list[Source], list[Source]]:
    """Return where the rows to train on are, and those to evaluate on.

    There are none of the latter with --eval_split, which holds out rows of the former.

    Args:
        open_source: a function of a name, a configuration, a split and whether it is required,
            like `open_rows`.
    """
    names = args.dataset_name
    if isinstance(names, str):
        names = [names]
    config = args.dataset_config
    split = args.dataset_train_split
    train: list[Any] = [open_source(name, config, split, True) for name in names]
    split = args.dataset_test_split
    test = []
    if args.eval_strategy != "no" and not args.eval_split:
        test = [open_source(name, config, split, False) for name in names]
        if args.eval_dataset_name:
            test = [open_source(args.eval_dataset_name, None, split, True)]
    return train, [source for source in test if source is not None]


def find_files(name: str, split: str, types: Sequence[str] = FILE_TYPES) -> tuple[Path, ...]:
    """Return the files of a split: one file, or those of a folder whose names begin with the split.

    A hub id has none.
    """
    if Path(name).suffix in types and not Path(name).is_dir():
        return (Path(name),)
    files = Path(name).glob(f"{glob.escape(split)}*")
    return tuple(sorted(file for file in files if file.suffix in types))


def open_rows(
    name: str,
    config: str | None,
    split: str,
    is_required: bool,
    text_columns: Sequence[str] = (),
    files: tuple[Path, ...] | None = None,
    streaming: bool = False,
) -> Source | None:
    """Return the rows of a split as they are, or None if it is empty and not required.

    Ends with 65 if they cannot be read, and with 69 if the hub cannot be reached.

    Args:
        config: configuration of a hub data set.
        text_columns: columns of CSV files that are text even if they look like numbers.
        files: of the split, by default `find_files`.
        streaming: read the rows only in order, and while downloading.
    """
    has_split = any(Path(name).rglob(f"{glob.escape(split)}*"))
    if Path(name).exists() and not has_split and not is_required:
        return None
    if files is None:
        files = find_files(name, split)
    if not files and Path(name).is_file():  # datasets would look for it on the hub
        fail(Exit.DATA, f"{name}: rows are read from {', '.join(FILE_TYPES)}: convert it")
    sizes = [file.stat().st_size for file in files if file.is_file()]
    if sizes and not any(sizes):
        fail(Exit.DATA, f"{name}: the file is empty")
    options: dict[str, Any]
    try:
        if files:
            options = reader_options(files[0].suffix, text_columns)
            options["data_files"] = {split: [literal(file) for file in files]}
        else:
            options = {"path": name, "name": config, "data_files": files_of_splits(name)}
        dataset = datasets.load_dataset(**options, streaming=streaming).get(split)
    except Exception as error:  # Each reader raises exceptions of its own.
        end_without_rows(name, error)
    if dataset is not None and (streaming or len(dataset)):
        return Source(name, files, dataset)
    if is_required:
        fail(Exit.DATA, f"{name}: no rows in split {split}")
    return None


def end_without_rows(name: str, error: Exception) -> NoReturn:
    """End with 65, or with 69 without the hub. An error of the disk, which may be full, is raised.

    Args:
        name: the data set that a reader raised the error for.
    """
    if isinstance(error, ConnectionError):
        fail(Exit.NO_HUB, f"{name}: {error}")
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and cause.errno in CANNOT_WRITE:
        raise cause
    fail(Exit.DATA, f"{name}: {in_one_line(cause)}")


def files_of_splits(name: str) -> dict[str, list[str]] | None:
    """Return the files of a folder's splits if its name is a pattern; else datasets finds them."""
    folder = literal(name)
    if folder == str(Path(name).absolute()):
        return None
    found = datasets.data_files.get_data_patterns(folder)
    return {split: [f"{folder}/{pattern}" for pattern in found[split]] for split in found}


def literal(path: Path | str) -> str:
    """Return a path as a pattern of this path only, since datasets expands brackets and stars."""
    return glob.escape(str(Path(path).absolute()))


def reader_options(file_type: str, text_columns: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of `datasets.load_dataset` for reading files of a type."""
    if file_type in (".jsonl", ".txt"):
        # Latin-1 decodes any byte, so that a line that is not UTF-8 can still be reported by number
        sample = "line" if file_type == ".jsonl" else "document"
        return {"path": "text", "encoding": "latin-1", "sample_by": sample}
    if file_type == ".csv":
        texts = dict.fromkeys(text_columns, str)
        return {"path": "csv", "keep_default_na": False, "converters": texts}
    return {"path": file_type.removeprefix(".")}


def row_of(source: Source, number: int) -> Row:
    """Return a row of a source as it is, by its number there, from 1."""
    row = source.dataset[number - 1]
    if source.file_type == ".jsonl":
        row = parse_line(row["text"])
    return row or {}


def parse_line(text: str) -> dict[str, Any] | None:
    """Return the object in a line of a .jsonl file, which was read as Latin-1; None if it is blank.

    Raises:
        ValueError: there is no object in it, or a lone surrogate, which no tokenizer takes.
    """
    line = decode(text)
    if not line.strip():
        return None
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object")
    if "\\u" in line:
        json.dumps(row, ensure_ascii=False).encode()
    return row


def decode(text: str) -> str:
    """Return the UTF-8 text that was read as Latin-1, without its byte order mark."""
    return text.encode("latin-1").decode("utf-8-sig")


# ---- Prepared rows ----
@dataclass(frozen=True)
class Rows:
    """The prepared rows of one or several sources, in numpy's format.

    Attributes:
        dataset: the columns that the recipe's function returned, and `row`: the number of the row
            in its file, from 1, counted on from one source to the next.
        notes: a line of the start summary: "2260, 3 truncated".
        sources: where the rows are from.
    """

    dataset: Any
    notes: str
    sources: Sequence[Source]

    def __len__(self) -> int:
        return len(self.dataset)

    def column(self, name: str) -> np.ndarray:
        """Return the values of a column: [rows]."""
        return np.asarray(self.dataset[name][:])

    def filter(self, keep: Callable[[Row], bool]) -> "Rows":
        """Return the rows of which a function is true, given a row as prepared."""
        dataset = self.dataset.filter(keep)
        if not len(dataset):
            fail(Exit.DATA, f"{self.sources[0].name}: no row is left after a filter")
        return replace(self, dataset=dataset, notes=f"{self.notes}; {len(dataset)} after a filter")

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

    @property
    def starts(self) -> np.ndarray:
        """The number before that of each source's first row: [sources]."""
        sizes = [len(source.dataset) for source in self.sources]
        return np.cumsum([0, *sizes[:-1]])

    def find(self, number: int) -> tuple[Source, int]:
        """Return the source of a row, and its number there, by its number `row`."""
        source = int(np.searchsorted(self.starts, number)) - 1
        return self.sources[source], number - int(self.starts[source])

    def place(self, index: int) -> str:
        """Return where the row at an index, counted from 0, comes from: "train.jsonl, line 7"."""
        source, number = self.find(int(self.dataset[index]["row"]))
        return source.place(number)


def read_rows(
    args: Any,
    prepare: Prepare,
    text_columns: Sequence[str] = (),
) -> tuple[Rows, Rows | None]:
    """Return all rows to train on and those to evaluate on, as `prepare` makes them.

    The latter are those of --eval_dataset_name, or of all data sets that have a
    --dataset_test_split. `hold_out_and_mix` comes next.

    Args:
        prepare: a function of one row, or a `functools.partial` of one. It returns the columns of
            the prepared row, and raises a ValueError if the row cannot be used, whose text
            continues "train.jsonl, line 7: ", as in "has no answer to train on". `Rows` reads the
            columns `length`, `largest`, the largest token, and `hash`, of all that is trained on;
            the notes count those that are `truncated`.
        text_columns: as in `open_rows`, besides those of the roles in --columns.
    """
    texts = [*args.COLUMN_ROLES, *args.columns_by_role.values(), *text_columns]
    train, test = open_sources(args, functools.partial(open_rows, text_columns=texts))
    rows = prepare_rows(train, prepare, args)
    return rows, prepare_rows(test, prepare, args) if test else None


def prepare_rows(
    sources: Sequence[Source],
    prepare: Callable[..., dict[str, Any]],
    args: Any,
    of_source: Callable[[Source], Mapping[str, Any]] | None = None,
) -> Rows:
    """Return the rows of some sources as `prepare` makes them, from the cache if it has them.

    The arguments are those of `read_rows`. A row that cannot be used ends the process with 65 and
    is named, unless --skip_bad_rows leaves it out.

    Args:
        of_source: a function of a source, which returns further arguments of `prepare`.
    """
    parts = []
    notes = []
    before = 0
    for source in sources:
        prepare_own = prepare
        if of_source is not None:
            prepare_own = functools.partial(prepare, **of_source(source))
        dataset = prepare_source(source, prepare_own, args)
        note = describe_source(source, dataset, args)
        if before:
            note = f"{source.name} (numbered from {before + 1}): {note}"
        notes.append(note)
        numbers = np.asarray(dataset[NUMBER][:], dtype=np.int64) + before
        parts.append(dataset.remove_columns([NUMBER, UNREAD]).add_column("row", numbers))
        before += len(source.dataset)
    joined = datasets.concatenate_datasets(parts).with_format("numpy")
    if len(sources) > 1:
        notes.insert(0, f"{len(joined)} in {len(sources)} data sets")
    return Rows(joined, "; ".join(notes), tuple(sources))


def prepare_source(source: Source, prepare: Prepare, args: Any) -> Any:
    """Return the usable rows of a source as `prepare` makes them, with NUMBER and UNREAD."""
    attempt = functools.partial(
        prepare_batch,
        prepare=copy.deepcopy(prepare),  # Others hash it as it is before its first call.
        place_of=replace(source, dataset=None).place,
        class_names=source.class_names,
        is_lines=source.file_type == ".jsonl",
        skip_bad_rows=args.skip_bad_rows,
    )
    # datasets knows functions of the recipe by their code, but those of modules by name only.
    key = Hasher.hash([source.dataset._fingerprint, attempt, hash_of_modules()])
    try:
        dataset = source.dataset.map(
            attempt,
            with_indices=True,
            batched=True,
            num_proc=args.dataset_num_proc,
            remove_columns=source.dataset.column_names,
            new_fingerprint=key,
            desc=f"Preparing {source.name}",
        )
    except BadRowsError as error:
        fail(Exit.DATA, *str(error).splitlines())
    if not len(dataset):
        fail(Exit.DATA, f"{source.name}: none of its rows can be used")
    return dataset


class BadRowsError(Exception):
    """Rows that cannot be used, as lines for the user."""


def prepare_batch(
    batch: Mapping[str, Sequence[Any]],
    indices: Sequence[int],
    prepare: Prepare,
    place_of: Callable[[int], str],
    class_names: Mapping[str, Sequence[str]],
    is_lines: bool,
    skip_bad_rows: bool,
) -> dict[str, list[Any]]:
    """Return the usable rows of a batch as `prepare` makes them: {column: values}.

    Only a ValueError is a problem of a row. Any other exception is a fault of `prepare`.

    Raises:
        BadRowsError: some cannot be used, and `skip_bad_rows` is false.
    """
    found = []
    problems = []
    for place, index in enumerate(indices):
        try:
            row: Any = {name: batch[name][place] for name in batch}
            if is_lines:
                row = parse_line(batch["text"][place])
            if row is None:
                continue
            for name in class_names:
                row[name] = name_classes(row[name], class_names[name])
            tracked = TrackedRow(row)
            prepared = {name: as_array(value) for name, value in prepare(tracked).items()}
        except ValueError as error:
            problems.append((index + 1, in_one_line(error)))
            continue
        except Exception as error:
            error.add_note(place_of(index + 1))
            raise
        found.append({**prepared, NUMBER: index + 1, UNREAD: json.dumps(tracked.unread())})
    if problems and not skip_bad_rows:
        count = f"{len(problems)} of these {len(indices)} rows cannot be used"
        named = [f"{place_of(number)}: {text}" for number, text in problems[:NUM_NAMED]]
        advice = f"{count}: fix them, or leave such rows out with --skip_bad_rows"
        raise BadRowsError("\n".join([*named, advice]))
    names = found[0] if found else [NUMBER]
    return {name: [row[name] for row in found] for name in names}


def as_array(value: Any) -> Any:
    """Return a list of whole numbers, such as tokens, as an array, which datasets writes faster."""
    if isinstance(value, list) and value and type(value[0]) is int:
        return np.array(value, dtype=np.int32)
    return value


def in_one_line(text: object) -> str:
    """Return the beginning of a text without line breaks."""
    return " ".join(str(text).split())[:400]


def hash_of_modules() -> str:
    """Return a hash of the modules that this process has imported from the recipe's folder.

    Packages count as a whole, since some of their modules are imported later, or on some ranks
    only. The recipe itself does not, so that the rows stay cached when its loop is edited.
    """
    folder = Path(__file__).resolve().parents[1]
    files: set[Path] = set()
    # The second name is that of the recipe for multiprocessing
    for name in {name.partition(".")[0] for name in sys.modules} - {"__main__", "__mp_main__"}:
        file = Path(getattr(sys.modules.get(name), "__file__", None) or "").resolve()
        if file.suffix != ".py" or "site-packages" in file.parts:
            continue
        if file.is_relative_to(folder):
            files.update(file.parent.rglob("*.py") if file.stem == "__init__" else [file])
    hashed = xxhash.xxh3_128()
    for file in sorted(files):
        hashed.update(f"{file.relative_to(folder)} ".encode() + file.read_bytes())
    return hashed.hexdigest()


# ---- What the start summary says of them ----
def describe_source(source: Source, dataset: Any, args: Any) -> str:
    """Return the numbers of rows of a source, and what nothing has read of them.

    Args:
        dataset: its usable rows, prepared.
    """
    counted = {
        "truncated": "truncated",
        "rewritten": "answers before the last not trained on, as the chat template rewrites them",
        "recolored": "images with transparency or CMYK colors, which become RGB on white",
    }
    notes = [str(len(dataset))]
    for column, told in counted.items():
        if column in dataset.column_names and any(dataset[column][:]):
            notes.append(f"{sum(dataset[column][:])} {told}")
    if args.skip_bad_rows:
        notes.append(f"{len(source.dataset) - len(dataset)} left out")
    text = ", ".join(notes)
    unread: dict[str, None] = {}
    for names in dataset.unique(UNREAD):
        unread |= dict.fromkeys(json.loads(names))
    if unread:
        text += f"; not read: {list_columns(unread)}"
    return text


def describe_rows(rows: Rows, eval_rows: Rows | None) -> dict[str, str]:
    """Return the start summary's lines: {"train rows": notes, "eval rows": notes}.

    Rows to evaluate on that equal rows to train on, as prepared, are a "warning".
    """
    if eval_rows is None:
        return {"train rows": rows.notes, "eval rows": "none"}
    notes = {"train rows": rows.notes, "eval rows": eval_rows.notes}
    num_copies = np.isin(eval_rows.column("hash"), rows.column("hash")).sum()
    if num_copies:
        notes["warning"] = (
            f"{num_copies} of the {len(eval_rows)} held-out rows are trained on too: an evaluation "
            "is better than on new rows; leave such copies out of the data"
        )
    return notes


# ---- Held out and mixed ----
def hold_out_and_mix(args: Any, rows: Rows, eval_rows: Rows | None) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on, after --eval_split and weights.

    Which ones are held out depends on nothing but --seed and the number of rows, so that each rank
    and a resumed run find the same. They are held out even if nothing is evaluated: the rows to
    train on do not depend on it. Ends with 65 if none of these remains.
    """
    if args.eval_split:
        number = int(args.eval_split)
        if args.eval_split < 1:
            number = max(1, round(args.eval_split * len(rows)))
        if number >= len(rows):
            fail(Exit.DATA, f"--eval_split {args.eval_split:g}: leaves no row to train on")
        drawn = np.random.default_rng(args.seed).permutation(len(rows))
        if args.eval_strategy != "no":
            held_out = rows.dataset.select(np.sort(drawn[:number]))
            told = f"{number} held out of the training rows (--eval_split)"
            eval_rows = replace(rows, dataset=held_out, notes=told)
        kept = rows.dataset.select(np.sort(drawn[number:]))
        told = f"{rows.notes}; {number} of these are held out (--eval_split)"
        rows = replace(rows, dataset=kept, notes=told)
    if len(rows.sources) > 1 and args.dataset_weights:
        rows = mix(rows, args.dataset_weights, args.seed)
    return rows, eval_rows


def mix(rows: Rows, weights: Sequence[float], seed: int) -> Rows:
    """Return as many rows as there are, in the shares that these weights give the data sets.

    A data set with more rows than its share is cut to a random choice of them, and one with fewer
    is repeated: each of its rows the same number of times, or once more. Which rows these are, and
    the order of all, depends on nothing but the seed and the numbers of rows.
    """
    source_of_row = np.searchsorted(rows.starts, rows.column("row")) - 1
    # Rounded where one share ends and the next begins, so that they add up
    ends = len(rows) * np.cumsum([0, *weights]) / sum(weights)
    shares = np.diff(np.round(ends).astype(int)).tolist()
    drawn = []
    notes = []
    for number, (source, share) in enumerate(zip(rows.sources, shares, strict=True)):
        own = np.flatnonzero(source_of_row == number)
        if not len(own):
            fail(Exit.DATA, f"{source.name}: --eval_split leaves none of its rows to train on")
        times, rest = divmod(share, len(own))
        once_more = np.random.default_rng([seed, number]).permutation(own)[:rest]
        drawn += [np.tile(own, times), once_more]
        notes.append(f"{share} from the {len(own)} rows of {source.name}")
    order = np.random.default_rng(seed).permutation(np.concatenate(drawn))
    written = " : ".join(f"{weight:g}" for weight in weights)
    told = f"{rows.notes}; mixed {written}: {', '.join(notes)}"
    return replace(rows, dataset=rows.dataset.select(order), notes=told)
