# SPDX-License-Identifier: Apache-2.0
"""Of the rows of a file only what the run learned is scored.

That loss and answers are those of the recipe and of scripts/generate.py: tests/launch.
"""

import json
from argparse import Namespace

import pytest

from evaluation.rows import measure_rows
from generation.loading import find_source, load_model
from generation.rows import columns_of, load_questions

LONGEST = 6  # tokens of an answer
USER = {"role": "user", "content": "Spell the word lamp."}
ANSWER = {"role": "assistant", "content": "l-a-m-p"}


@pytest.fixture
def evaluate(adapters):
    """A function from a file of rows to the metrics of a run, samples, and how they were asked."""

    def measure(path, folder=adapters):
        source = find_source(str(folder))
        options = {"answer_pattern": None, "max_new_tokens": LONGEST, "batch_size": 2}
        options |= {"dtype": "float32", "device": "cpu", "load_in_4bit": False}
        args = Namespace(rows=path, **options)
        questions = load_questions(path, columns_of(source.arguments))
        facts, samples = measure_rows(args, source, load_model(source, args), questions)
        return facts.pop("metrics"), samples, facts

    return measure


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
