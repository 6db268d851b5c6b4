# SPDX-License-Identifier: Apache-2.0
"""Rows of a file: exact match as scripts/generate.py has it, and the loss of the model."""

import json
from argparse import Namespace

import pytest
import torch

from core.data import IGNORED
from evaluation.rows import measure_rows
from generation import loading
from generation.answering import Answerer
from generation.contestants import find_contestants
from generation.rows import answer_all, columns_of, load_questions, score
from generation.session import judge

WORDS = ("lamp", "tiger", "a", "sea", "window")
LONGEST = 6  # tokens of an answer
USER = {"role": "user", "content": "Spell the word lamp."}
ANSWER = {"role": "assistant", "content": "l-a-m-p"}


@pytest.fixture
def evaluate(adapters):
    """A function from a file of rows to the metrics of a run, samples, and how they were asked."""

    def measure(path, folder=adapters):
        (contestant,) = find_contestants([str(folder)], with_base=False)
        options = {"answer_pattern": None, "max_new_tokens": LONGEST, "batch_size": 2}
        options |= {"dtype": "float32", "device": "cpu", "load_in_4bit": False}
        args = Namespace(rows=path, **options)
        questions = load_questions(path, columns=columns_of(contestant.arguments))
        model = contestant.load(args)
        facts, samples = measure_rows(args, contestant, model, questions)
        return facts.pop("metrics"), samples, facts

    return measure


@pytest.fixture
def answerer(adapters):
    """The run as scripts/generate.py asks it."""
    (contestant,) = find_contestants([str(adapters)], with_base=False)
    model = loading.load_model(contestant.source, "float32", "cpu")
    return Answerer(model, contestant.template(), 0, LONGEST)


def rows_of(answers):
    prompts = [f"Spell the word {word}." for word in WORDS]
    return [{"prompt": a, "completion": b} for a, b in zip(prompts, answers, strict=True)]


def test_exact_match_and_answers_are_those_of_generate(evaluate, answerer, write_rows):
    questions = load_questions(write_rows(*rows_of("abcde")))
    answers = answer_all(answerer, questions, 5)
    references = [*answers[:2], "none", *answers[3:4], "none"]
    path = write_rows(*rows_of(references))
    expected = score(judge(load_questions(path), answers, None))
    figures, samples, _ = evaluate(path)
    assert [sample["answer"] for sample in samples] == answers
    assert figures["exact_match"]["value"] == expected["exact_match"] == 3 / 5
    assert [sample["exact_match"] for sample in samples] == [1, 1, 0, 1, 0]


def test_the_loss_is_that_of_the_model_over_all_tokens(evaluate, answerer, write_rows):
    path = write_rows(*rows_of(["l-a-m-p", "t-i-g-e-r", "a", "s-e-a and more words", "w"]))
    total, number = 0.0, 0
    tokenizer = answerer.template.tokenizer
    for question in load_questions(path):
        prompt = answerer.template.render(question.conversation, add_generation_prompt=True)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        answer = tokenizer(f"{question.reference}<|end_of_turn|>", add_special_tokens=False)
        tokens = before + answer["input_ids"]
        labels = [IGNORED] * len(before) + answer["input_ids"]
        with torch.no_grad():
            loss = answerer.model(torch.tensor([tokens]), labels=torch.tensor([labels])).loss
        total += loss.item() * len(answer["input_ids"])
        number += len(answer["input_ids"])
    figures, samples, _ = evaluate(path)
    assert figures["loss"]["value"] == pytest.approx(total / number, rel=1e-5)
    assert sum(sample["num_tokens"] for sample in samples) == number


def with_arguments(adapters, tmp_path, **arguments):
    """A copy of the run with other arguments."""
    folder = tmp_path / "run"
    folder.mkdir()
    for path in adapters.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    run = json.loads((folder / "run.json").read_text())
    run["arguments"] |= arguments
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def test_only_what_the_run_learned_is_scored(evaluate, write_rows, adapters, tmp_path):
    again = [{"role": "user", "content": "Again."}, {"role": "assistant", "content": "L-A"}]
    rows = write_rows({"messages": [USER, ANSWER, *again]})
    folder = with_arguments(adapters, tmp_path, learn="last")
    _, ((all_answers),), _ = evaluate(rows)
    _, ((last),), _ = evaluate(rows, folder=folder)
    assert all_answers["num_tokens"] > last["num_tokens"] and last["reference"] == "L-A"
