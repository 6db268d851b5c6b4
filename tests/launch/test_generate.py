# SPDX-License-Identifier: Apache-2.0
"""scripts/generate.py answers with what the recipe wrote, adapters too, and says what is wrong with
its input."""

import json
import sys

import pytest

from launching import REPO, data_of, recipe, run


def generate(*arguments, **options):
    return run(sys.executable, REPO / "scripts" / "generate.py", *arguments, **options)


@pytest.fixture(scope="module")
def adapters(tiny, once):
    def train(folder):
        done = recipe(*data_of(tiny), "--use_peft", "--max_steps", 2, "--output_dir", folder)
        assert done.returncode == 0, done.output[-3000:]

    return once("adapters", train)


def test_adapters_are_found_and_scored(adapters, tiny, tmp_path):
    done = generate(
        adapters,
        "--file",
        tiny / "data" / "test.jsonl",
        "--max_new_tokens",
        8,
        "--output",
        tmp_path / "answers.jsonl",
        "--json",
        tmp_path / "score.json",
    )
    assert done.returncode == 0, done.output
    assert done.output.splitlines()[-1].startswith("exact match: 0.")
    score = json.loads((tmp_path / "score.json").read_text())
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert score["rows"] == len(answers) == 21 and len(score["skills"]) == 7
    assert score["correct"] == sum(answer["answer"] == answer["reference"] for answer in answers)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["{tmp}/none", "--prompt", "a"], (64, 65), "none"),
        (["{tmp}", "--prompt", "a"], (64, 65), "config.json"),
        (["{adapters}", "--file", "{tmp}/none.jsonl"], (64, 65), "none.jsonl"),
        (["{adapters}", "--file", "{tmp}/bad.jsonl"], (65,), "line 2"),
        (["{adapters}", "--prompt", "a", "--temperature", "-1"], (64,), "--temperature"),
    ],
    ids=["no folder", "no model in it", "no file", "bad row", "bad value"],
)
def test_bad_input_ends_with_a_message(arguments, code, says, adapters, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt"\n')
    done = generate(*[word.format(tmp=tmp_path, adapters=adapters) for word in arguments])
    assert done.returncode in code and says in done.output and "Traceback" not in done.output, (
        done.output
    )
