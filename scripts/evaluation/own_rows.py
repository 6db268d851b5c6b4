# SPDX-License-Identifier: Apache-2.0
"""Documents of a file as a task of lm-eval: what it asks of a model, and how it scores that.

Prompts are texts already, so lm-eval adds no chat template and no examples to them. Answers are
scored by their tokens, which are those of the recipe; lm-eval would tokenize the text again.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask

from core.loss import perplexity_of
from evaluation.documents import Document
from generation.rows import is_match

ANSWER = "generate_until"  # methods of evaluation.asking.AskedModel, as lm-eval calls them
SCORE: Any = "loglikelihood_of_tokens"  # lm-eval's annotation has only its own methods
SPLIT = "rows"
VERSION = 1  # changes when rows are asked or scored in another way

Sum = tuple[float, int]  # the summed loss of tokens in nats, and the number of the tokens


class RowsTask(ConfigurableTask):
    """A task whose documents are given, each with its requests."""

    def construct_requests(self, doc: dict[str, Any], ctx: Any, **kwargs: Any) -> list[Instance]:
        """Return what a model is asked for a document. lm-eval names the arguments."""
        common = {"doc": doc, "metadata": kwargs["metadata"]}
        requests = []
        if not doc["choices"]:
            words = (doc["prompt"], dict(self.config.generation_kwargs or {}))
            requests.append(Instance(request_type=ANSWER, arguments=words, idx=0, **common))
        for scored in doc["scored"]:
            tokens = scored["tokens"]
            for start, end in scored["spans"]:
                words = (doc["prompt"], tokens[:start], tokens[start:end])
                place = len(requests)
                requests.append(Instance(request_type=SCORE, arguments=words, idx=place, **common))
        return requests


def make_task(
    name: str, documents: Sequence[Document], max_new_tokens: int, pattern: str | None
) -> RowsTask:
    """Return documents as a task: of multiple choice if they have choices.

    Args:
        pattern: regular expression whose group 1 is compared; None compares the whole text.
    """
    rows = []
    for document in documents:
        row = document.to_json()
        row["scored"] = [vars(scored) for scored in document.scored]
        rows.append(row)
    metrics = METRICS_OF_CHOICES
    process = score_choices
    if not documents[0].choices:
        metrics = METRICS_OF_ANSWERS
        process = partial(score_answer, pattern=pattern)

    def make_dataset(**_: Any) -> dict[str, Dataset]:
        """Return the rows in memory; lm-eval would write those of a file to a cache."""
        return {SPLIT: Dataset.from_list(rows)}

    config = {
        "task": name,
        "custom_dataset": make_dataset,
        "test_split": SPLIT,
        "output_type": ANSWER,
        "doc_to_text": "prompt",
        "doc_to_target": "reference",
        "num_fewshot": 0,
        "generation_kwargs": {"until": [], "max_gen_toks": max_new_tokens, "do_sample": False},
        "process_results": process,
        "metric_list": metrics,
        "metadata": {"version": VERSION},
    }
    return RowsTask(config=config)


def score_answer(doc: dict[str, Any], results: Sequence[Any], pattern: str | None) -> dict:
    """Return the metrics of a document: of the model's answer, and of the reference's tokens.

    Args:
        results: the answer, and of each scored part (log-likelihood, whether it is greedy).
    """
    answer, *scores = results
    total = -sum(score for score, _ in scores)
    number = 0
    for scored in doc["scored"]:
        number += sum(end - start for start, end in scored["spans"])
    correct = is_match(answer.strip(), doc["reference"], pattern)
    return {"exact_match": int(correct), "loss": (total, number), "perplexity": (total, number)}


def score_choices(doc: dict[str, Any], results: Sequence[Any]) -> dict[str, int]:
    """Return whether the likeliest choice is the right one; acc_norm: likeliest per character.

    Args:
        results: of each choice (log-likelihood, whether it is greedy).
    """
    choices = doc["choices"]
    scores = [score for score, _ in results]
    by_length = [score / len(choice) for score, choice in zip(scores, choices, strict=True)]
    right = choices.index(doc["reference"])
    return {
        "acc": int(scores.index(max(scores)) == right),
        "acc_norm": int(by_length.index(max(by_length)) == right),
    }


def loss_of(sums: Sequence[Sum]) -> float:
    """Return the mean loss of all tokens in nats, as the recipe's eval_loss."""
    return math.fsum(total for total, _ in sums) / sum(number for _, number in sums)


def exponential_of_loss(sums: Sequence[Sum]) -> float:
    """Return the perplexity of all tokens."""
    return perplexity_of(loss_of(sums))


METRICS_OF_ANSWERS = [
    {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True},
    {"metric": "loss", "aggregation": loss_of, "higher_is_better": False},
    {"metric": "perplexity", "aggregation": exponential_of_loss, "higher_is_better": False},
]
METRICS_OF_CHOICES = [
    {"metric": "acc", "aggregation": "mean", "higher_is_better": True},
    {"metric": "acc_norm", "aggregation": "mean", "higher_is_better": True},
]
