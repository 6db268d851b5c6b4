# SPDX-License-Identifier: Apache-2.0
"""Rows of a file: the answers of a model to them, and the loss of the recipe's evaluation.

A prompt is that of scripts/generate.py. What is scored are the tokens that the recipe trains on, so
that their loss is the recipe's eval_loss of the same rows.
"""

import argparse
import math
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError

from common import Exit, stop
from core.data import IGNORED
from core.generation import most_positions
from generation.answering import Answerer
from generation.contestants import Contestant
from generation.rows import Question, answer_all, columns_in, columns_of, is_match
from llama import tokenize_row

# Arguments of a run that say which tokens of a row are trained on
SCORING = ("learn", "completion_only_loss", "assistant_only_loss")


def measure_rows(
    args: argparse.Namespace,
    contestant: Contestant,
    model: torch.nn.Module,
    questions: Sequence[Question],
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a task with exact match and loss, as results.json has it, and each row's answer.

    Exact match is that of the likeliest answers, the loss the mean of all tokens.

    Raises SystemExit with 65 for a row that is too long.
    """
    answerer = contestant.answerer(model, args.max_new_tokens)
    try:
        answers = answer_all(answerer, questions, args.batch_size)
        sums, num_truncated = score_rows(contestant, answerer, questions)
    except (ValueError, TemplateError) as error:
        stop(Exit.DATA, f"{args.rows}: {error}")
    samples = []
    for question, answer, (total, number) in zip(questions, answers, sums, strict=True):
        is_right = is_match(answer, question.reference, args.answer_pattern)
        sample: dict[str, Any] = {"place": question.place, "skill": question.skill}
        sample |= {"messages": question.conversation.messages, "reference": question.reference}
        sample |= {"answer": answer, "exact_match": int(is_right)}
        samples.append(sample | {"loss": total / number, "num_tokens": number})
    matches = [(sample["exact_match"], 1) for sample in samples]
    metrics = {
        "exact_match": metric_of(matches, higher_is_better=True),
        "loss": metric_of(sums, higher_is_better=False),
    }
    return {"rows": len(questions), "truncated": num_truncated, "metrics": metrics}, samples


def metric_of(sums: Sequence[tuple[float, int]], higher_is_better: bool) -> dict[str, Any]:
    """Return a mean over what rows consist of, and its standard error by how much rows differ.

    Args:
        sums: of each row, and of how many values.
    """
    number = sum(count for _, count in sums)
    mean = math.fsum(total for total, _ in sums) / number
    squares = math.fsum((total - mean * count) ** 2 for total, count in sums)
    rows = len(sums)
    stderr = math.sqrt(squares * rows / (rows - 1)) / number if rows > 1 else None
    return {"value": mean, "stderr": stderr, "higher_is_better": higher_is_better}


@torch.inference_mode()
def score_rows(
    contestant: Contestant, answerer: Answerer, questions: Sequence[Question]
) -> tuple[list[tuple[float, int]], int]:
    """Return of each row the summed loss of the tokens trained on, in nats, and their number.

    And how many rows are longer than in training, so that the end of the answer is missing.
    """
    arguments = contestant.arguments
    columns = columns_of(arguments)
    length = most_positions(answerer.model.config)
    length = min(arguments.get("max_length") or length, length)
    options = {name: arguments[name] for name in SCORING if name in arguments}
    sums = []
    num_truncated = 0
    for question in questions:
        known = columns_in(question.row, columns)
        encoded = tokenize_row(question.row, answerer.template, length, known, **options)
        num_truncated += encoded["truncated"]
        tokens = torch.tensor([encoded["input_ids"]], device=answerer.model.device)
        labels = torch.tensor(encoded["labels"][1:], device=answerer.model.device)
        logits = answerer.model(input_ids=tokens).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(
            logits, labels, ignore_index=IGNORED, reduction="sum"
        )
        sums.append((loss.item(), int((labels != IGNORED).sum())))
    return sums, num_truncated
