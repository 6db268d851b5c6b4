# SPDX-License-Identifier: Apache-2.0
"""Rows of a file: the answers of a model to them, and the loss of the recipe's evaluation.

A prompt is that of scripts/generate.py. What is scored are the tokens that the recipe trains on, so
that their loss is the recipe's eval_loss of the same rows. Rows with `choices` are multiple choice:
each choice is scored as if it were the only answer that the recipe trains on.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError

from core.data import IGNORED
from core.generation import most_positions
from evaluation.contestants import Contestant
from evaluation.report import Figure, mean_figure, weighted_figure
from exits import Exit, stop
from generation.answering import Answerer
from generation.rows import (
    Question,
    Row,
    columns_in,
    columns_of_run,
    is_match,
    load_rows,
    to_question,
)
from llama import PROMPT_AND_ANSWER, tokenize_row

CHOICES = "choices"
RIGHT = "answer"  # the column with the place, from 0, or the text of the right choice
# Arguments of a run that say which tokens of a row are trained on
SCORING = ("learn", "completion_only_loss", "assistant_only_loss")


@dataclass(frozen=True)
class Document:
    """A row as one model is asked it.

    Attributes:
        choices: the texts of a multiple choice; empty without one.
        filled: the row, or one of training for each choice.
    """

    place: str
    question: Question
    choices: list[str]
    filled: list[Row]


def read_documents(args: argparse.Namespace, contestant: Contestant) -> list[Document]:
    """Return the rows of --rows as a model is asked them.

    Raises SystemExit with 65 after a line that names the first bad row and its place.
    """
    columns = columns_of_run(contestant.run.name)

    def convert(place: str, row: Row) -> Document:
        if not isinstance(row, dict) or row.get(CHOICES) is None:
            question = to_question(place, row, args.answer_pattern, columns)
            return Document(place, question, [], [row])
        try:
            choices, right = read_choices(row)
            filled = [fill_in(row, choice, columns) for choice in choices]
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None
        return Document(place, to_question(place, filled[right], None, columns), choices, filled)

    documents = load_rows(args.rows, args.limit, columns, convert)
    for document in documents:
        if bool(document.choices) != bool(documents[0].choices):
            stop(Exit.DATA, f"{document.place}: of another kind than {documents[0].place}")
    return documents


def read_choices(row: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the choices of a row and the place of the right one. Raises ValueError."""
    choices = row[CHOICES]
    if not isinstance(choices, list) or not all(isinstance(one, str) for one in choices):
        raise ValueError(f'"{CHOICES}" must be a list of texts')
    choices = [choice.strip() for choice in choices]
    if len(set(choices)) < max(2, len(choices)) or "" in choices:
        raise ValueError(f'"{CHOICES}" must be at least two different texts')
    right = row.get(RIGHT)
    if isinstance(right, str) and right.strip() in choices:
        return choices, choices.index(right.strip())
    if type(right) is int and 0 <= right < len(choices):
        return choices, right
    raise ValueError(f'"{RIGHT}" must be one of its choices, or its place from 0: {right!r}')


def fill_in(row: Mapping[str, Any], choice: str, columns: Mapping[str, str]) -> Row:
    """Return a row of a multiple choice as one of training, with a choice as its answer.

    Args:
        columns: {role: column} of the run.
    """
    kept = {key: value for key, value in row.items() if key not in (CHOICES, RIGHT)}
    for question, answer in PROMPT_AND_ANSWER.items():
        if columns.get(question, question) in row:
            return kept | {columns.get(answer, answer): choice}
    column = columns.get("messages", "messages")
    if not isinstance(row.get(column), list):
        names = ", ".join(PROMPT_AND_ANSWER)
        raise ValueError(f"has {CHOICES}, but no question: name its column {names} or messages")
    return kept | {column: [*row[column], {"role": "assistant", "content": choice}]}


# ---- What a model makes of them ----
def measure_rows(
    args: argparse.Namespace,
    contestant: Contestant,
    model: torch.nn.Module,
    documents: Sequence[Document],
) -> tuple[list[Figure], list[dict[str, Any]], dict[str, Any]]:
    """Return the figures of rows, what was answered to each, and how they were asked.

    Raises SystemExit with 65 for a row that is too long.
    """
    answerer = contestant.answerer(model, args.max_new_tokens)
    scorer = Scorer(contestant, answerer, bool(documents[0].choices))
    try:
        if documents[0].choices:
            figures, samples = measure_choices(scorer, documents)
        else:
            figures, samples = measure_answers(scorer, documents, args)
    except (ValueError, TemplateError) as error:
        stop(Exit.DATA, f"{args.rows}: {error}")
    for document, sample in zip(documents, samples, strict=True):
        sample["place"] = document.place
        sample["messages"] = document.question.conversation.messages
        sample["reference"] = document.question.reference
        sample["skill"] = document.question.skill
    return figures, samples, {"rows": len(documents), "truncated": scorer.num_truncated}


class Scorer:
    """Sums the loss of the tokens of rows that the recipe trains on.

    Attributes:
        num_truncated: rows that the recipe would cut, so that the end of the answer is missing.
    """

    def __init__(self, contestant: Contestant, answerer: Answerer, is_choice: bool) -> None:
        """Read how the run tokenized rows; what stands before a choice is the same for all."""
        self.answerer = answerer
        self.is_choice = is_choice
        self.num_truncated = 0
        self._columns = columns_of_run(contestant.run.name)
        arguments = contestant.arguments
        self._length = most_positions(answerer.model.config)
        self._options: dict[str, Any] = {"learn": "last"}
        if not is_choice:
            self._length = min(arguments.get("max_length") or self._length, self._length)
            self._options = {name: arguments[name] for name in SCORING if name in arguments}

    @torch.inference_mode()
    def score(self, row: Row) -> tuple[float, int]:
        """Return the summed loss of a row in nats, and the number of the tokens.

        Raises ValueError for a choice that is longer than the model: a part of it would be likelier
        than the whole.
        """
        columns = columns_in(row, self._columns)
        template = self.answerer.template
        encoded = tokenize_row(row, template, self._length, columns, **self._options)
        self.num_truncated += encoded["truncated"]
        if self.is_choice and encoded["truncated"]:
            raise ValueError(f"a choice ends after the {self._length} tokens that the model takes")
        model = self.answerer.model
        tokens = torch.tensor([encoded["input_ids"]], device=model.device)
        labels = torch.tensor(encoded["labels"][1:], device=model.device)
        logits = model(input_ids=tokens).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum"
        )
        return loss.item(), int((labels != IGNORED).sum())


def measure_answers(
    scorer: Scorer, documents: Sequence[Document], args: argparse.Namespace
) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Return exact match of the likeliest answers, and the mean loss of all tokens."""
    samples: list[dict[str, Any]] = []
    for start in range(0, len(documents), args.batch_size):
        batch = documents[start : start + args.batch_size]
        asked = [document.question for document in batch]
        answers = scorer.answerer.answer([question.conversation for question in asked])
        for question, answer in zip(asked, answers, strict=True):
            is_right = is_match(answer, question.reference, args.answer_pattern)
            samples.append({"answer": answer, "exact_match": int(is_right)})
    sums = [scorer.score(document.filled[0]) for document in documents]
    for sample, (total, number) in zip(samples, sums, strict=True):
        sample |= {"loss": total / number, "num_tokens": number}
    exact_match = [sample["exact_match"] for sample in samples]
    return [mean_figure("exact_match", exact_match), weighted_figure("loss", sums)], samples


def measure_choices(
    scorer: Scorer, documents: Sequence[Document]
) -> tuple[list[Figure], list[dict[str, Any]]]:
    """Return how often the likeliest choice is the right one; acc_norm: likeliest a character."""
    samples = []
    for document in documents:
        scores = [-scorer.score(row)[0] for row in document.filled]
        by_length = []
        for score, choice in zip(scores, document.choices, strict=True):
            by_length.append(score / len(choice))
        right = document.choices.index(document.question.reference)
        sample: dict[str, Any] = {"choices": document.choices, "log_likelihoods": scores}
        sample["acc"] = int(scores.index(max(scores)) == right)
        sample["acc_norm"] = int(by_length.index(max(by_length)) == right)
        samples.append(sample)
    figures = []
    for metric in ("acc", "acc_norm"):
        figures.append(mean_figure(metric, [sample[metric] for sample in samples]))
    return figures, samples
