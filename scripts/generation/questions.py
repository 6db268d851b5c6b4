# SPDX-License-Identifier: Apache-2.0
"""Rows of a file as questions, read and interpreted as recipes/llama.py does in training.

Columns that the run's --columns named, which its run.json has, need not be named again.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError

from core.chat import Conversation
from core.data import FILE_TYPES, literal, parse_line, reader_options
from exits import Exit, first_line, stop
from generation.recorded import arguments_of_run, find_run
from llama import Arguments, row_to_conversation

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A conversation up to its last answer in words, and that answer."""

    conversation: Conversation
    reference: str
    skill: str | None


def columns_of_run(folder: Path) -> dict[str, str]:
    """Return {role: column} of the run that wrote a folder; {} without its run.json.

    Only roles of conversations count: preference tuning has others too.
    Raises SystemExit with 65 after a line if the file cannot be read.
    """
    try:
        columns = dict(pair.split("=", 1) for pair in arguments_of_run(folder).get("columns", []))
    except (ValueError, TypeError, AttributeError):
        stop(Exit.DATA, f"{find_run(folder)}: its columns are not a list of ROLE=COLUMN")
    return {role: column for role, column in columns.items() if role in Arguments.COLUMN_ROLES}


def load_questions(
    path: Path,
    limit: int | None = None,
    answer_pattern: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[Question]:
    """Return the first `limit` rows of a file, by default all.

    answer_pattern: regular expression that every reference has to match.
    columns: {role: column} of the run; a row that lacks one of them is read without them.
    Raises SystemExit with 65 after a line that names the first bad row and its place.
    """

    def convert(place: str, row: Row) -> Question:
        return to_question(place, row, answer_pattern, columns or {})

    return load_rows(path, limit, columns or {}, convert)


def load_rows(
    path: Path, limit: int | None, columns: Mapping[str, str], convert: Callable[[str, Row], T]
) -> list[T]:
    """Return what `convert` makes of the place and the content of the first rows of a file.

    convert: raises ValueError with the place of a bad row.
    Raises SystemExit with 65 after a line that names the first bad row and its place.
    """
    if not path.is_file():
        stop(Exit.DATA, f"{path}: no such file")
    found = []
    try:
        for place, row in read_rows(path, columns):
            if len(found) == limit:
                break
            found.append(convert(place, row))
    except (OSError, ValueError, DatasetGenerationError) as error:
        reason = first_line(error.__cause__ or error)
        stop(Exit.DATA, reason if str(path) in reason else f"{path}: {reason}")
    if not found:
        stop(Exit.DATA, f"{path}: no rows")
    return found


def read_rows(path: Path, columns: Mapping[str, str]) -> Iterator[tuple[str, Row]]:
    """Yield each row with its place, such as `rows.jsonl, line 3`."""
    if path.suffix not in FILE_TYPES:
        raise ValueError(f"{path}: must be {', '.join(FILE_TYPES)}")
    if path.suffix == ".jsonl":
        yield from read_json_lines(path)
        return
    options = reader_options(path.suffix, [*Arguments.COLUMN_ROLES, *columns.values()])
    rows = load_dataset(**options, data_files=literal(path), split="train")
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def read_json_lines(path: Path) -> Iterator[tuple[str, Row]]:
    """Yield each row of a .jsonl file with its line number, which datasets does not report."""
    for number, line in enumerate(path.read_text(encoding="latin-1").split("\n"), 1):
        place = f"{path}, line {number}"
        try:
            row = parse_line(line)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        if row is not None:
            yield place, row


def to_question(
    place: str, row: Row, answer_pattern: str | None, columns: Mapping[str, str]
) -> Question:
    """Return a row as a question. Raises ValueError with the place and what is wrong with it."""
    try:
        conversation = row_to_conversation(row, columns_in(row, columns))
        last = find_last_answer(conversation)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from None
    reference = conversation.messages[last]["content"].strip()
    if answer_pattern is not None and re.search(answer_pattern, reference) is None:
        problem = f"its answer does not match --answer_pattern {answer_pattern}"
        raise ValueError(f"{place}: {problem}")
    return Question(conversation.up_to(last), reference, row.get("skill"))


def columns_in(row: Row, columns: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the columns of the run, or None for a row that lacks one of them."""
    if isinstance(row, dict) and set(columns.values()) <= row.keys():
        return columns
    return None


def find_last_answer(conversation: Conversation) -> int:
    """Return the place, from 0, of the last message that is trained on and has a text.

    Raises ValueError if there is none, since the assistant only calls tools.
    """
    answers = []
    for place, message in enumerate(conversation.messages):
        if conversation.is_trained_on[place] and message["content"].strip():
            answers.append(place)
    if not answers:
        raise ValueError("has no answer in words to compare with: the assistant only calls tools")
    return answers[-1]
