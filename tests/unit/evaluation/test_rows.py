# SPDX-License-Identifier: Apache-2.0
"""Of the rows of a file only what the run learned is scored.

That loss and answers are those of the recipe and of scripts/generate.py: tests/launch.
"""

from argparse import Namespace

from adapter_folders import write_adapters
from evaluation.rows import measure_rows
from generation.loading import find_source, load_model
from generation.rows import load_questions
from launching import write_rows

LONGEST = 6  # tokens of an answer
USER = {"role": "user", "content": "Spell the word lamp."}
ANSWER = {"role": "assistant", "content": "l-a-m-p"}


def sample_of(folder, path):
    """What evaluate.py tells of the one row of a file."""
    source = find_source(str(folder))
    options = {"answer_pattern": None, "max_new_tokens": LONGEST, "batch_size": 2}
    options |= {"dtype": "float32", "device": "cpu", "load_in_4bit": False}
    args = Namespace(rows=path, **options)
    questions = load_questions(path, source.arguments)
    _, (sample,) = measure_rows(args, source, load_model(source, args), questions)
    return sample


def test_only_what_the_run_learned_is_scored(base, adapters, tmp_path):
    again = [{"role": "user", "content": "Again."}, {"role": "assistant", "content": "L-A"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": [USER, ANSWER, *again]}])
    all_answers = sample_of(adapters, rows)
    last = sample_of(write_adapters(tmp_path / "run", base, {"learn": "last"}), rows)
    assert all_answers["num_tokens"] > last["num_tokens"] and last["reference"] == "L-A"
