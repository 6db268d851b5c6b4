# SPDX-License-Identifier: Apache-2.0
"""Rows of a file: the answers of a model to them, and the loss of the recipe's evaluation.

A prompt is that of scripts/generate.py. What is scored are the tokens that the recipe trains on, so
that their loss is the recipe's eval_loss of the same rows.
"""

import argparse
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from transformers import BatchEncoding

from common import Exit, stop
from core.data import IGNORED
from core.generation import most_positions
from generation.answering import UNANSWERED, Answerer
from generation.loading import Source
from generation.rows import Question, columns_in, columns_of, judge
from llama import tokenize_row
from tasks.illustrated import IllustratedTemplate, tokenize_illustrated
from vlm import row_to_conversation

# Arguments of a run that say which tokens of a row are trained on
SCORING = ("learn", "completion_only_loss", "assistant_only_loss")


def measure_rows(
    args: argparse.Namespace, source: Source, model: torch.nn.Module, questions: Sequence[Question]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return a task with exact match and loss, as results.json has it, and each row's answer.

    Exact match is that of the likeliest answers, the loss the mean of all tokens.

    Raises SystemExit with 65 for a row that is too long.
    """
    answerer = Answerer(model, source.template(), 0, args.max_new_tokens)
    conversations = [question.conversation for question in questions]
    try:
        answers = answerer.answer(conversations, args.batch_size)
        scored = [score(answerer, source.arguments, question) for question in questions]
    except UNANSWERED as error:
        stop(Exit.DATA, f"{args.rows}: {error}")
    samples = judge(questions, answers, args.answer_pattern)
    for sample, question, (total, number, _) in zip(samples, questions, scored, strict=True):
        sample |= {"place": question.place, "loss": total / number, "num_tokens": number}
    matches = [(int(sample["correct"]), 1) for sample in samples]
    losses = [(total, number) for total, number, _ in scored]
    metrics = {"exact_match": metric_of(matches), "loss": metric_of(losses)}
    num_truncated = sum(is_truncated for _, _, is_truncated in scored)
    return {"rows": len(questions), "truncated": num_truncated, "metrics": metrics}, samples


def metric_of(sums: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Return a mean over what rows consist of, and its standard error by how much rows differ.

    Args:
        sums: of each row, and of how many values.
    """
    number = sum(count for _, count in sums)
    mean = math.fsum(total for total, _ in sums) / number
    squares = math.fsum((total - mean * count) ** 2 for total, count in sums)
    rows = len(sums)
    stderr = math.sqrt(squares * rows / (rows - 1)) / number if rows > 1 else None
    return {"value": mean, "stderr": stderr}


@torch.inference_mode()
def score(
    answerer: Answerer, arguments: Mapping[str, Any], question: Question
) -> tuple[float, int, bool]:
    """Return a row's summed loss of the tokens trained on, in nats, and their number.

    And whether it is longer than in training, so that the end of the answer is missing.

    Args:
        arguments: of the run.
    """
    length = most_positions(answerer.model.config)
    length = min(arguments.get("max_length") or length, length)
    options = {name: arguments[name] for name in SCORING if name in arguments}
    columns = columns_in(question.row, columns_of(arguments))
    template = answerer.template
    if isinstance(template, IllustratedTemplate):
        read = partial(row_to_conversation, columns=columns)
        options |= question.image_options
        encoded = tokenize_illustrated(question.row, read, template, length, **options)
        images = [load()[0] for load in question.conversation.images]
        inputs = template.encode([encoded["text"]], [images], return_tensors="pt")
    else:
        encoded = tokenize_row(question.row, template, length, columns, **options)
        inputs = BatchEncoding({"input_ids": [encoded["input_ids"]]}, tensor_type="pt")
    labels = torch.tensor(encoded["labels"][1:], device=answerer.model.device)
    logits = answerer.model(**inputs.to(labels.device)).logits[0, :-1].float()
    loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
    return loss.item(), int((labels != IGNORED).sum()), encoded["truncated"]
