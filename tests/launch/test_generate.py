# SPDX-License-Identifier: Apache-2.0
"""scripts/generate.py scores answers by row, and says what is wrong with its input."""

import json
import sys

import pytest

from launching import REPO, run


def generate(*arguments):
    return run(sys.executable, REPO / "scripts" / "generate.py", *arguments)


def test_answers_are_scored(tiny, tmp_path):
    words = ["--file", tiny / "data" / "test.jsonl", "--max_new_tokens", 8]
    words += ["--output", tmp_path / "answers.jsonl", "--json", tmp_path / "score.json"]
    done = generate(tiny / "model", *words)
    assert done.returncode == 0, done.output
    score = json.loads((tmp_path / "score.json").read_text())
    answers = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert score["rows"] == len(answers) == 21 and len(score["skills"]) == 7
    assert score["correct"] == sum(answer["answer"] == answer["reference"] for answer in answers)


@pytest.mark.parametrize(
    ("words", "codes", "word"),
    [
        (["{tmp}/none", "--prompt", "a"], (64, 65), "none"),
        (["{tmp}", "--prompt", "a"], (64, 65), "config.json"),
        (["{model}", "--file", "{tmp}/none.jsonl"], (64, 65), "none.jsonl"),
        (["{model}", "--file", "{tmp}/bad.jsonl"], (65,), "line 2"),
        (["{model}", "--prompt", "a", "--temperature", "-1"], (64,), "--temperature"),
    ],
)
def test_bad_input_is_named(words, codes, word, tiny, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt"\n')
    done = generate(*[part.format(tmp=tmp_path, model=tiny / "model") for part in words])
    assert done.returncode in codes and word in done.output, done.output
    assert "Traceback" not in done.output
