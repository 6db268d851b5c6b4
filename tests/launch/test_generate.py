# SPDX-License-Identifier: Apache-2.0
"""scripts/generate.py scores answers by row, and says what is wrong with its input."""

import pytest

from launching import errors_of, read_json, read_rows, script


def test_answers_are_scored(tiny, tmp_path):
    words = ["--file", tiny / "data" / "test.jsonl", "--max_new_tokens", 8]
    words += ["--output", tmp_path / "answers.jsonl", "--json", tmp_path / "score.json"]
    script("generate", tiny / "model", *words, code=0)
    score = read_json(tmp_path / "score.json")
    answers = read_rows(tmp_path / "answers.jsonl")
    assert score["rows"] == len(answers) == 21 and len(score["skills"]) == 7
    assert score["correct"] == sum(answer["answer"] == answer["reference"] for answer in answers)


@pytest.mark.parametrize(
    ("words", "code", "word"),
    [
        (["{tmp}", "--prompt", "a"], 64, "config.json"),
        (["{model}", "--file", "{tmp}/bad.jsonl"], 65, "line 2"),
    ],
)
def test_bad_input_is_named(words, code, word, tiny, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt"\n')
    words = [part.format(tmp=tmp_path, model=tiny / "model") for part in words]
    (line,) = errors_of(script("generate", *words, code=code))
    assert word in line
