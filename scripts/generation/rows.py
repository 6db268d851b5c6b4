# SPDX-License-Identifier: Apache-2.0
"""Rows of a file as questions, read as recipes/llama.py reads them, and how many answers are right.

Columns that the run's --columns named, which its run.json has, need not be named again.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from datasets import load_dataset
from datasets.exceptions import DatasetGenerationError

from common import Exit, first_line, stop
from core.chat import Conversation
from core.data import FILE_TYPES, literal, parse_line, reader_options
from generation.answering import Answerer, printable
from llama import Arguments, row_to_conversation

Row = dict[str, Any]
T = TypeVar("T")
SHOWN = 8  # answers that are printed


@dataclass(frozen=True)
class Question:
    """A row: its conversation up to the last answer in words, and that answer."""

    place: str  # such as `rows.jsonl, line 3`
    row: Row
    conversation: Conversation
    reference: str
    skill: str | None


def columns_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return {role: column} by the arguments of a run.

    Only roles of conversations count: preference tuning has others too.
    """
    columns = dict(pair.split("=", 1) for pair in arguments.get("columns") or [])
    return {role: column for role, column in columns.items() if role in Arguments.COLUMN_ROLES}


def load_questions(
    path: Path,
    limit: int | None = None,
    pattern: str | None = None,
    columns: Mapping[str, str] | None = None,
) -> list[Question]:
    """Return the first `limit` rows of a file, by default all.

    Args:
        pattern: regular expression that every reference has to match.
        columns: {role: column} of the run; a row that lacks one of them is read without them.

    Raises SystemExit with 65 after a line that names the first bad row and its place.
    """
    columns = columns or {}
    return load_rows(
        path, limit, columns, lambda place, row: to_question(place, row, pattern, columns)
    )


def load_rows(
    path: Path, limit: int | None, columns: Mapping[str, str], convert: Callable[[str, Row], T]
) -> list[T]:
    """Return what `convert` makes of the place and the content of the first rows of a file.

    Args:
        convert: raises ValueError with the place of a bad row.

    Raises SystemExit with 65 after a line that names the first bad row and its place.
    """
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
    """Yield each row with its place, such as `rows.jsonl, line 3`. Raises OSError, ValueError."""
    if path.suffix not in FILE_TYPES:
        raise ValueError(f"{path}: must be {', '.join(FILE_TYPES)}")
    if path.suffix == ".jsonl":  # Line by line, since datasets does not say which one is bad
        for number, line in enumerate(path.read_text(encoding="latin-1").split("\n"), 1):
            place = f"{path}, line {number}"
            try:
                row = parse_line(line)
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
            if row is not None:
                yield place, row
        return
    options = reader_options(path.suffix, [*Arguments.COLUMN_ROLES, *columns.values()])
    rows = load_dataset(**options, data_files=literal(path), split="train")
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def to_question(place: str, row: Row, pattern: str | None, columns: Mapping[str, str]) -> Question:
    """Return a row as a question. Raises ValueError with the place and what is wrong with it."""
    try:
        conversation = row_to_conversation(row, columns_in(row, columns))
        last = find_last_answer(conversation)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{place}: {error}") from None
    reference = conversation.messages[last]["content"].strip()
    if pattern is not None and re.search(pattern, reference) is None:
        raise ValueError(f"{place}: its answer does not match --answer_pattern {pattern}")
    return Question(place, row, conversation.up_to(last), reference, row.get("skill"))


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


def is_plain(conversation: Conversation) -> bool:
    """Return whether a conversation has only texts: each server parses tools in its own way."""
    return not conversation.tools and all(
        set(message) == {"role", "content"} for message in conversation.messages
    )


# ---- Answers and their score ----
@dataclass(frozen=True)
class Answered:
    """A question, the model's answer, and whether it is right."""

    question: Question
    answer: str
    correct: bool

    def as_row(self) -> dict[str, Any]:
        """Return the JSON object that --output writes."""
        row: dict[str, Any] = {"messages": self.question.conversation.messages}
        if self.question.conversation.tools:
            row["tools"] = self.question.conversation.tools
        return row | {
            "reference": self.question.reference,
            "skill": self.question.skill,
            "answer": self.answer,
            "correct": self.correct,
        }


def answer_all(answerer: Answerer, questions: Sequence[Question], batch_size: int) -> list[str]:
    """Return the answers to questions, `batch_size` at a time."""
    answers = []
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        answers += answerer.answer([question.conversation for question in batch])
    return answers


def find_pattern_problem(pattern: str) -> Iterator[str]:
    """Yield what is wrong with a regular expression."""
    try:
        if re.compile(pattern).groups == 0:
            yield f"--answer_pattern {pattern}: put (...) around what to compare"
    except re.error as error:
        yield f"--answer_pattern {pattern}: {error}"


def is_match(answer: str, reference: str, pattern: str | None) -> bool:
    """Return whether two texts, or what group 1 of the pattern finds in them, are equal.

    White space around what the pattern finds is ignored. The reference must match the pattern.
    """
    if pattern is None:
        return answer == reference
    found = re.search(pattern, answer)
    wanted = re.search(pattern, reference)
    if found is None or wanted is None:
        return False
    return found[1].strip() == wanted[1].strip()


def score(answered: Sequence[Answered]) -> dict[str, Any]:
    """Return the share of right answers, of all and of each skill."""
    rows = Counter(one.question.skill for one in answered)
    correct = Counter(one.question.skill for one in answered if one.correct)
    skills = {skill: correct[skill] / rows[skill] for skill in rows if skill}
    return {
        "exact_match": correct.total() / rows.total(),
        "correct": correct.total(),
        "rows": rows.total(),
        "skills": skills,
    }


def print_answers(answered: Sequence[Answered]) -> None:
    """Print some answers from all over the file, and the reference where an answer is wrong."""
    for one in answered[:: max(1, len(answered) // SHOWN)][:SHOWN]:
        mark = "right"
        if not one.correct:
            mark = f"wrong, should be: {one.question.reference}"
        asked = one.question.conversation.messages[-1]["content"]
        print(printable(f"{asked} -> {one.answer} ({mark})"))


def print_score(answered: Sequence[Answered]) -> None:
    """Print a line for each skill, and finally one for all rows."""
    groups: dict[str, list[Answered]] = {}
    for one in answered:
        if one.question.skill:
            groups.setdefault(one.question.skill, []).append(one)
    groups["exact match"] = list(answered)
    for name, group in groups.items():
        correct = sum(one.correct for one in group)
        print(f"{name}: {correct / len(group):.4f} ({correct}/{len(group)})")
