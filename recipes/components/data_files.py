# SPDX-License-Identifier: Apache-2.0
"""Where the rows of a split are, and how files of each type are read."""

import difflib
import glob
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from components.bad_rows import explain_cause
from components.full_cache import end_if_cache_is_full
from components.hub_ids import find_missing
from core.exits import Exit, fail

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

FILE_TYPES = (".jsonl", ".json", ".parquet", ".csv")
DOCUMENT_TYPES = (*FILE_TYPES, ".txt")  # for pretraining; each .txt file is one document
# Columns of a CSV file that are text even if they look like numbers
TEXT_COLUMNS = (
    "prompt",
    "completion",
    "chosen",
    "rejected",
    "instruction",
    "input",
    "output",
    "question",
    "answer",
)
OFFLINE = (
    "Offline: python scripts/make_tiny.py RECIPE runs/tiny, then "
    "--model_name_or_path runs/tiny/model --dataset_name runs/tiny/data/train.jsonl"
)


@dataclass(frozen=True)
class Source:
    """Where the rows of one split are.

    Attributes:
        name: the data set as the user named it: a file, a folder or a hub id.
        config: configuration of a hub data set.
        split: name of the split.
        files: files of the split; none if it is a hub data set.
        is_required: whether the run ends if there is no such split.
    """

    name: str
    config: str | None
    split: str
    files: tuple[Path, ...]
    is_required: bool

    @property
    def file_type(self) -> str | None:
        """The suffix that all files share; None if there are no files."""
        return self.files[0].suffix if self.files else None

    @property
    def unit(self) -> str:
        """What a number counts: lines of a .jsonl file, or rows."""
        return "line" if self.file_type == ".jsonl" else "row"

    @property
    def prefix(self) -> str:
        """What stands before the number of a row: "train.jsonl, line"."""
        place = self.files[0] if len(self.files) == 1 else self.name
        return f"{place}, {self.unit}"


def find_files(name: str, split: str, types: Sequence[str] = FILE_TYPES) -> tuple[Path, ...]:
    """Return the files of a split: one file, or those of a folder whose names begin with the split.

    A hub id has none.
    """
    if Path(name).suffix in types and not Path(name).is_dir():
        return (Path(name),)
    files = Path(name).glob(f"{glob.escape(split)}*")
    return tuple(sorted(file for file in files if file.suffix in types))


def has_files_of(name: str, split: str) -> bool:
    """Return whether a folder has anything whose name begins with the split."""
    return any(Path(name).rglob(f"{glob.escape(split)}*"))


def load_rows(source: Source, text_columns: Sequence[str] = ()) -> "Dataset | None":
    """Return the rows of a split as they are, or None if it does not exist or is empty.

    The rows of a .jsonl file are its lines, in the column `text`, which `parse_line` reads. Ends
    with 65 if the files cannot be read, and with 69 if the hub cannot be reached.

    Args:
        text_columns: columns of CSV files that are text, besides TEXT_COLUMNS.
    """
    return load_split(source, text_columns, streaming=False) or None


def load_stream(source: Source, text_columns: Sequence[str] = ()) -> "IterableDataset | None":
    """Return the same rows as `load_rows`, but only in order, and read while downloading."""
    return load_split(source, text_columns, streaming=True)


def load_split(source: Source, text_columns: Sequence[str], streaming: bool) -> Any:
    """Return a split as datasets loads it, or None if it does not exist."""
    import datasets

    key = source.split
    place: dict[str, Any]
    try:
        missing = find_missing_data_set(source.name)
        if missing is not None:
            fail(Exit.DATA, missing)
        if source.file_type is None and Path(source.name).is_file():
            types = ", ".join(FILE_TYPES)
            fail(Exit.DATA, f"{source.name}: rows are read from {types}: convert it to one of them")
        if source.file_type is None:
            place = {"path": source.name, "name": source.config}
            folder = literal(source.name)
            if folder != str(Path(source.name).absolute()):
                found = datasets.data_files.get_data_patterns(folder)
                files = {name: [f"{folder}/{one}" for one in found[name]] for name in found}
                place["data_files"] = files
        else:
            refuse_odd_files(source)
            key = "train"  # datasets' name for the rows of given files
            place = reader_options(source.file_type, text_columns)
            place["data_files"] = [literal(file) for file in source.files]
        splits = datasets.load_dataset(**place, streaming=streaming)
    except ConnectionError as error:
        fail(Exit.NO_HUB, f"{source.name}: {error}", OFFLINE)
    except Exception as error:  # the readers of files may raise anything
        end_if_cache_is_full(source.name, error, of_rows=True)
        fail(Exit.DATA, f"{source.name}: {explain_cause(error, source.name)}")
    return splits.get(key)


def literal(path: Path | str) -> str:
    """Return a path as a pattern of this path only, since datasets expands brackets and stars."""
    return glob.escape(str(Path(path).absolute()))


def find_missing_data_set(name: str) -> str | None:
    """Return that a file or folder does not exist, with a similar name if there is one, or None.

    Args:
        name: of the data, which may also be a hub id.
    """
    path = Path(name)
    if path.suffix in DOCUMENT_TYPES and not path.exists():
        problem = f"{path}: no such file"
        for close in difflib.get_close_matches(path.name, list_names(path.parent), 1):
            problem += f"; did you mean {path.with_name(close)}?"
        return problem
    return find_missing(name, "dataset")


def list_names(folder: Path) -> list[str]:
    """Return the names of what is in a folder; none if it cannot be read."""
    return [path.name for path in folder.glob("*")]


def refuse_odd_files(source: Source) -> None:
    """End with 65 if a file is empty, or of another type than the first."""
    if source.files == (Path(source.name),):
        if source.files[0].stat().st_size == 0:
            fail(Exit.DATA, f"{source.name}: the file is empty")
        return
    odd = []
    for file in source.files:
        if file.suffix != source.file_type or file.stat().st_size == 0:
            odd.append(file.name)
    if odd:
        names = ", ".join(odd)[:200]
        fail(Exit.DATA, f"{source.name}: {names}: empty, or not of the type of the first file")


def reader_options(file_type: str, text_columns: Sequence[str] = ()) -> dict[str, Any]:
    """Return the arguments of `datasets.load_dataset` for reading files of a type."""
    if file_type == ".jsonl":
        # Latin-1 decodes any byte, so that a line that is not UTF-8 can still be reported by number
        return {"path": "text", "encoding": "latin-1"}
    if file_type == ".txt":
        return {"path": "text", "encoding": "latin-1", "sample_by": "document"}
    if file_type == ".csv":
        texts = dict.fromkeys([*TEXT_COLUMNS, *text_columns], str)
        return {"path": "csv", "keep_default_na": False, "converters": texts}
    return {"path": file_type.removeprefix(".")}


def parse_line(text: str) -> dict[str, Any]:
    """Return the object in a line of a .jsonl file, which was read as Latin-1.

    Raises:
        ValueError: if there is none, with the reason.
    """
    line = decode(text)
    try:
        row = json.loads(line, object_pairs_hook=object_or_pairs)
    except RecursionError:
        raise ValueError("is nested too deep") from None
    if not isinstance(row, dict):
        raise ValueError("is not a JSON object with each key once")
    return row


def decode(text: str) -> str:
    """Return the UTF-8 text that was read as Latin-1, without its byte order mark."""
    return text.encode("latin-1").decode("utf-8-sig")


def object_or_pairs(pairs: list[tuple[str, Any]]) -> Any:
    """Return a JSON object as a dict, or as a list of its pairs if a key occurs twice."""
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else pairs
