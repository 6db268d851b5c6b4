# SPDX-License-Identifier: Apache-2.0
"""Own rows in lm-eval: exact match as scripts/generate.py has it, and the loss of the model."""

import math
from argparse import Namespace

import pytest
import torch

from core.data import IGNORED
from evaluation.contestants import find_contestants
from evaluation.documents import Reader
from generation import loading
from generation.answering import Answerer
from generation.rows import load_questions, score
from generation.session import answer_all, judge

WORDS = ("lamp", "tiger", "a", "sea", "window")
LONGEST = 6  # tokens of an answer


@pytest.fixture
def evaluate(adapters):
    """A function from a file of rows to the figures of the run, {metric: figure}, and samples."""
    from evaluation import session

    (contestant,) = find_contestants([str(adapters)], with_base=False)

    def measure(path, batch_size=2, pattern=None):
        args = Namespace(
            rows=path,
            answer_pattern=pattern,
            max_new_tokens=LONGEST,
            batch_size=batch_size,
            dtype="float32",
            device="cpu",
            load_in_4bit=False,
            seed=1,
            limit=None,
            confirm_run_unsafe_code=False,
            log_samples=False,
        )
        documents = Reader(contestant, pattern, LONGEST).read(path, None)
        job = session.Job(args, [contestant], [documents], loaded=None)
        measured, samples = session.measure(job, 0)
        return {figure.metric: figure for figure in measured.figures}, samples[path.stem]

    return measure


@pytest.fixture
def answerer(adapters):
    """The run as scripts/generate.py asks it."""
    (contestant,) = find_contestants([str(adapters)], with_base=False)
    model = loading.load_model(contestant.source, "float32", "cpu")
    return Answerer(model, contestant.template, 0, LONGEST)


def rows_of(answers):
    prompts = [f"Spell the word {word}." for word in WORDS]
    return [{"prompt": a, "completion": b} for a, b in zip(prompts, answers, strict=True)]


def test_exact_match_and_answers_are_those_of_generate(evaluate, answerer, write_rows):
    questions = load_questions(write_rows(*rows_of("abcde")))
    answers = answer_all(answerer, questions, 5)
    references = [*answers[:2], "none", *answers[3:4], "none"]
    path = write_rows(*rows_of(references))
    expected = score(judge(load_questions(path), answers, None))
    figures, samples = evaluate(path)
    assert [sample["answer"] for sample in samples] == answers
    assert figures["exact_match"].value == expected["exact_match"] == 3 / 5
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
    figures, samples = evaluate(path)
    # fp32: batches of other widths differ in the last digits
    assert figures["loss"].value == pytest.approx(total / number, rel=1e-5)
    assert figures["perplexity"].value == pytest.approx(math.exp(total / number), rel=1e-4)
    assert sum(sample["num_tokens"] for sample in samples) == number


@pytest.mark.parametrize("batch_size", [1, 5])
def test_the_batch_size_changes_nothing(batch_size, evaluate, write_rows):
    path = write_rows(*rows_of(["l-a-m-p", "t-i-g-e-r", "a", "s-e-a", "w"]))
    figures, samples = evaluate(path)
    others, other_samples = evaluate(path, batch_size)
    assert others["loss"].value == pytest.approx(figures["loss"].value, rel=1e-5)
    assert [one["answer"] for one in samples] == [one["answer"] for one in other_samples]


def test_the_likeliest_choice_is_the_answer(evaluate, answerer, write_rows):
    rows = [
        {"prompt": f"Spell the word {word}.", "choices": ["x", "l-a-m-p", "yes"], "answer": 2}
        for word in WORDS
    ]
    _, samples = evaluate(write_rows(*rows))
    for sample in samples:
        scores = sample["log_likelihoods"]
        assert len(scores) == 3 and "answer" not in sample
        assert sample["acc"] == (max(scores) == scores[2])
    tokenizer = answerer.template.tokenizer
    tokens = tokenizer(f"{samples[0]['prompt']}x<|end_of_turn|>", add_special_tokens=False)
    ids = torch.tensor([tokens["input_ids"]])
    with torch.no_grad():
        logits = answerer.model(ids).logits[0, :-1].log_softmax(-1)
    of_choice = logits[[-2, -1], ids[0, -2:]].sum().item()
    assert samples[0]["log_likelihoods"][0] == pytest.approx(of_choice, rel=1e-4)
