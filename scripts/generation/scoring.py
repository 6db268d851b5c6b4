# SPDX-License-Identifier: Apache-2.0
"""How many answers are right: exact match, for all rows and for each skill."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from generation.answering import Answerer
from generation.printing import printable
from generation.questions import Question

T = TypeVar("T")

SHOWN = 8  # answers that are printed


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


def find_pattern_problem(pattern: str) -> Iterator[str]:
    """Yield what is wrong with a regular expression."""
    try:
        if re.compile(pattern).groups == 0:
            yield f"--answer_pattern {pattern}: put (...) around what to compare"
    except re.error as error:
        yield f"--answer_pattern {pattern}: {error}"


def answer_all(
    answerer: Answerer, questions: Sequence[Question], batch_size: int, pattern: str | None
) -> list[Answered]:
    """Answer questions, `batch_size` at a time.

    pattern: regular expression whose group 1 is compared; None compares the whole text.
    """
    answered = []
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        answers = answerer.answer([question.conversation for question in batch])
        for question, answer in zip(batch, answers, strict=True):
            correct = is_match(answer, question.reference, pattern)
            answered.append(Answered(question, answer, correct))
    return answered


def is_match(answer: str, reference: str, pattern: str | None) -> bool:
    """Return whether two texts, or what the pattern finds in them, are equal.

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
    for one in spread_over(answered, SHOWN):
        mark = "right"
        if not one.correct:
            mark = f"wrong, should be: {one.question.reference}"
        print(
            printable(
                f"{one.question.conversation.messages[-1]['content']} -> {one.answer} ({mark})"
            )
        )


def spread_over(items: Sequence[T], count: int) -> list[T]:
    """Return `count` of the items, or all if there are fewer, from the first to the last."""
    if len(items) <= count:
        return list(items)
    last = len(items) - 1
    return [items[place * last // (count - 1)] for place in range(count)]


def print_score(answered: Sequence[Answered]) -> None:
    """Print a line for each skill, and finally one for all rows."""
    groups: dict[str, list[Answered]] = {}
    for one in answered:
        if one.question.skill:
            groups.setdefault(one.question.skill, []).append(one)
    for skill, group in groups.items():
        print(line_of(skill, group))
    print(line_of("exact match", answered))


def line_of(name: str, answered: Sequence[Answered]) -> str:
    """Return a line such as `exact match: 0.9421 (242/257)`."""
    correct = sum(one.correct for one in answered)
    return f"{name}: {correct / len(answered):.4f} ({correct}/{len(answered)})"


def write_answers(path: Path, answered: Sequence[Answered]) -> None:
    """Write one JSON object per question."""
    lines = [json.dumps(one.as_row()) + "\n" for one in answered]
    path.write_text("".join(lines), encoding="utf-8")


def write_score(path: Path, answered: Sequence[Answered]) -> None:
    """Write the score as JSON."""
    path.write_text(json.dumps(score(answered), indent=2) + "\n", encoding="utf-8")
