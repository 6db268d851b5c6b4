# SPDX-License-Identifier: Apache-2.0
"""Rows of a file as a model is asked them, and the tokens of their answers that are scored.

A prompt is that of scripts/generate.py. What is scored are the tokens that the recipe trains on, so
that their loss is the recipe's eval_loss of the same rows. Rows with `choices` are multiple choice:
each choice is scored as if it were the only answer that the recipe trains on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from core.chat import fit_arguments
from core.data import IGNORED
from evaluation.contestants import Contestant
from exits import Exit, stop
from generation.rows import Row, columns_in, load_rows, to_question
from llama import PROMPT_AND_ANSWER, tokenize_row

CHOICES = "choices"
RIGHT = "answer"  # the column with the place, from 0, or the text of the right choice
# Arguments of a run that say which tokens of a row are trained on
SCORING = ("learn", "completion_only_loss", "assistant_only_loss")
ONLY_THE_CHOICE: dict[str, Any] = {"learn": "last"}  # What comes before is the same for all choices

Span = tuple[int, int]  # first token, and the one after the last


@dataclass(frozen=True)
class Scored:
    """Tokens, and the parts of them that are scored, none of which begins with token 0."""

    tokens: list[int]
    spans: list[Span]


@dataclass(frozen=True)
class Document:
    """A row as one model is asked it.

    Attributes:
        place: such as `rows.jsonl, line 3`.
        prompt: the text that the model is asked to continue.
        reference: the right answer.
        choices: the texts of a multiple choice; empty without one.
        scored: the tokens of the answer, or of each choice, after the prompt.
        truncated: whether the recipe would cut the row, so that the end of the answer is missing.
    """

    place: str
    prompt: str
    reference: str
    skill: str | None
    choices: list[str]
    scored: list[Scored]
    truncated: bool

    @property
    def right(self) -> int:
        """Return the place of the right one among the choices."""
        return self.choices.index(self.reference)

    def to_json(self) -> dict[str, Any]:
        """Return the document without its tokens."""
        found = asdict(self)
        del found["scored"], found["truncated"]
        return found


@dataclass(frozen=True)
class Reader:
    """What reads the rows of a file for one model.

    Attributes:
        pattern: what every reference has to match, or None.
        max_new_tokens: the length of the longest answer, for which a prompt has to leave room.
    """

    contestant: Contestant
    pattern: str | None
    max_new_tokens: int

    def read(self, path: Path, limit: int | None) -> list[Document]:
        """Return the first rows of a file, by default all.

        Raises SystemExit with 65 after a line that names the first bad row and its place.
        """
        documents = load_rows(path, limit, self.contestant.columns, self._make)
        kinds = [bool(document.choices) for document in documents]
        if len(set(kinds)) > 1:
            other = documents[kinds.index(not kinds[0])]
            kind = f"no {CHOICES}" if kinds[0] else CHOICES
            stop(Exit.DATA, f"{other.place}: has {kind}, unlike {documents[0].place}")
        return documents

    def _make(self, place: str, row: Row) -> Document:
        """Return a row as a document. Raises ValueError with its place."""
        filled = [row]
        choices: list[str] = []
        right = 0
        if isinstance(row, dict) and row.get(CHOICES) is not None:
            try:
                choices, right = read_choices(row)
                filled = [fill_in(row, choice, self.contestant.columns) for choice in choices]
            except ValueError as error:
                raise ValueError(f"{place}: {error}") from None
        pattern = None if choices else self.pattern
        question = to_question(place, filled[right], pattern, self.contestant.columns)
        template = self.contestant.template
        try:
            conversation = fit_arguments(question.conversation, template)
            prompt = template.render(conversation, add_generation_prompt=True)
            parts = [self._score(one, is_choice=bool(choices)) for one in filled]
        except (ValueError, TemplateError) as error:
            raise ValueError(f"{place}: {error}") from None
        if not choices:
            self._check_room(place, prompt)
        return Document(
            place,
            prompt,
            question.reference,
            question.skill,
            choices,
            [scored for scored, _ in parts],
            truncated=any(truncated for _, truncated in parts),
        )

    def _score(self, row: Row, is_choice: bool) -> tuple[Scored, bool]:
        """Return the tokens of a row that are scored, and whether the recipe would cut it.

        Raises ValueError for a choice that is longer than the model: a part of it would be likelier
        than the whole.
        """
        contestant = self.contestant
        arguments = contestant.arguments
        length = contestant.longest
        options = ONLY_THE_CHOICE
        if not is_choice:
            length = min(arguments.get("max_length") or length, length)
            options = {name: arguments[name] for name in SCORING if name in arguments}
        columns = columns_in(row, contestant.columns)
        encoded = tokenize_row(row, contestant.template, length, columns, **options)
        if is_choice and encoded["truncated"]:
            raise ValueError(f"a choice ends after the {length} tokens that the model takes")
        scored = Scored(encoded["input_ids"], spans_of(encoded["labels"]))
        return scored, encoded["truncated"]

    def _check_room(self, place: str, prompt: str) -> None:
        """Raise ValueError for a prompt that leaves no room for the longest answer."""
        encoded = self.contestant.tokenizer(prompt, add_special_tokens=False)
        length = len(encoded["input_ids"])
        room = self.contestant.longest - length
        if room < self.max_new_tokens:
            problem = f"its prompt has {length} tokens; the model is limited to"
            fix = f"pass --max_new_tokens {room}" if room > 0 else "shorten it or remove the row"
            raise ValueError(f"{place}: {problem} {self.contestant.longest}: {fix}")


def spans_of(labels: Sequence[int]) -> list[Span]:
    """Return the parts of the tokens that are trained on; nothing predicts token 0."""
    marks = [False]
    for label in labels[1:]:
        marks.append(label != IGNORED)
    marks.append(False)
    ends = []
    for place, (before, mark) in enumerate(pairwise(marks), 1):
        if before != mark:
            ends.append(place)
    return list(zip(ends[::2], ends[1::2], strict=True))


def read_choices(row: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the choices of a row and the place of the right one. Raises ValueError."""
    choices = row[CHOICES]
    if not isinstance(choices, list) or len(choices) < 2:
        raise ValueError(f'"{CHOICES}" must be a list of at least two texts')
    if not all(isinstance(choice, str) and choice.strip() for choice in choices):
        raise ValueError(f'"{CHOICES}" must be texts that are not empty')
    choices = [choice.strip() for choice in choices]
    if len(set(choices)) < len(choices):
        raise ValueError(f'"{CHOICES}" has the same text twice')
    right = row.get(RIGHT)
    if isinstance(right, str) and right.strip() in choices:
        return choices, choices.index(right.strip())
    is_place = isinstance(right, int) and not isinstance(right, bool)
    if is_place and 0 <= right < len(choices):
        return choices, right
    raise ValueError(f'"{RIGHT}" must be one of its choices, or its place from 0: {right!r}')


def fill_in(row: Mapping[str, Any], choice: str, columns: Mapping[str, str]) -> Row:
    """Return a row of a multiple choice as one of training, with a choice as its answer.

    Args:
        columns: {role: column} of the run.
    """
    kept = {key: value for key, value in row.items() if key not in (CHOICES, RIGHT)}
    for question, answer in PROMPT_AND_ANSWER.items():
        column = columns.get(question, question)
        if column in row:
            return kept | {column: row[column], columns.get(answer, answer): choice}
    messages = row.get(columns.get("messages", "messages"))
    if isinstance(messages, list) and messages:
        turn = {"role": "assistant", "content": choice}
        return kept | {columns.get("messages", "messages"): [*messages, turn]}
    names = ", ".join(PROMPT_AND_ANSWER)
    raise ValueError(f"has {CHOICES}, but no question: name its column {names} or messages")
