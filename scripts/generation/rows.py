# SPDX-License-Identifier: Apache-2.0
"""Rows of a file as questions, read as recipes/vlm.py reads them, and how many answers are right.

Columns that the run's --columns named, which its run.json has, need not be named again.
"""

import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import Exit, stop
from core.chat import Conversation
from core.data import parse_line
from tasks.illustrated import IMAGE, IMAGE_COLUMNS, PLACEHOLDER, image_options
from tasks.images import load_picture, open_images
from vlm import Arguments, row_to_conversation

Row = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """A row: its conversation up to the last answer in words, and that answer.

    Attributes:
        image_options: how `load_picture` finds the images of the row.
    """

    place: str  # such as `rows.jsonl, line 3`
    row: Row
    conversation: Conversation
    reference: str
    skill: str | None
    image_options: dict[str, Any]


def columns_of(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return {role: column} by the arguments of a run.

    Only roles of conversations count: preference tuning has others too.
    """
    columns = dict(pair.split("=", 1) for pair in arguments.get("columns") or [])
    return {role: column for role, column in columns.items() if role in Arguments.COLUMN_ROLES}


def load_questions(
    path: Path, arguments: Mapping[str, Any], limit: int | None = None, pattern: str | None = None
) -> list[Question]:
    """Return the first `limit` rows of a file, by default all.

    Args:
        arguments: of the run, for its columns, without which a row is read that lacks one of them,
            and for where its images are.
        pattern: regular expression that every reference has to match.

    Raises SystemExit with 65 after a line that names the first bad row and its place.
    """
    columns = columns_of(arguments)
    texts = [*Arguments.COLUMN_ROLES, *columns.values()]
    columned = [columns.get(role, role) for role in IMAGE_COLUMNS]
    source: Any = open_images(str(path), None, "train", True, columned, text_columns=texts)
    found_by: dict[str, Any] = {"image_folder": None, "allow_image_urls": False, **arguments}
    options = image_options(source, Namespace(**found_by))
    found = []
    for number, row in enumerate(source.dataset, 1):
        if len(found) == limit:
            break
        place = source.place(number)
        try:
            if source.file_type == ".jsonl":
                row = parse_line(row["text"])
            if row is not None:
                found.append(to_question(place, row, pattern, columns, options))
        except (ValueError, TypeError) as error:
            stop(Exit.DATA, f"{place}: {error}")
    if not found:
        stop(Exit.DATA, f"{path}: no rows")
    return found


def to_question(
    place: str, row: Row, pattern: str | None, columns: Mapping[str, str], options: dict[str, Any]
) -> Question:
    """Return a row as a question. Raises ValueError with what is wrong with it."""
    if "chosen" in row and "completion" not in row:
        row = {**row, "completion": row["chosen"]}  # A row of preference tuning
    conversation = row_to_conversation(row, columns_in(row, columns))
    loads = [partial(load_picture, image, **options) for image in conversation.images]
    conversation = replace(conversation, images=loads)
    spoken = [bool(message["content"].strip()) for message in conversation.messages]
    answers = [n for n, trained in enumerate(conversation.is_trained_on) if trained and spoken[n]]
    if not answers:
        raise ValueError("has no answer in words to compare with: the assistant only calls tools")
    last = answers[-1]
    reference = conversation.messages[last]["content"].strip()
    if pattern is not None and re.search(pattern, reference) is None:
        raise ValueError(f"its answer does not match --answer_pattern {pattern}")
    conversation = conversation.up_to(last)
    return Question(place, row, conversation, reference, row.get("skill"), options)


def columns_in(row: Row, columns: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the columns of the run, or None for a row that lacks one of them."""
    return columns if set(columns.values()) <= row.keys() else None


def is_plain(conversation: Conversation) -> bool:
    """Return whether there are only texts: other programs have the rest in their own way."""
    return not (conversation.tools or conversation.images) and all(
        set(message) == {"role", "content"} for message in conversation.messages
    )


# ---- Answers and their score ----
def judge(
    questions: Sequence[Question], answers: Sequence[str], pattern: str | None
) -> list[dict[str, Any]]:
    """Return what is written of each answer: what was asked, the reference, whether it is right."""
    lines = []
    for question, answer in zip(questions, answers, strict=True):
        messages = []
        for message in question.conversation.messages:
            content = message["content"].replace(IMAGE, PLACEHOLDER)
            messages.append({**message, "content": content})
        line: dict[str, Any] = {"messages": messages}
        if question.conversation.tools:
            line["tools"] = question.conversation.tools
        line |= {"reference": question.reference, "skill": question.skill, "answer": answer}
        lines.append(line | {"correct": is_match(answer, question.reference, pattern)})
    return lines


def find_pattern_problem(pattern: str | None) -> Iterator[str]:
    """Yield what is wrong with a regular expression."""
    try:
        if pattern is not None and re.compile(pattern).groups == 0:
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


def score(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the share of right answers, of all and of each skill."""
    rows = Counter(line["skill"] for line in lines)
    correct = Counter(line["skill"] for line in lines if line["correct"])
    return {
        "exact_match": correct.total() / rows.total(),
        "correct": correct.total(),
        "rows": rows.total(),
        "skills": {skill: correct[skill] / rows[skill] for skill in rows if skill},
    }
