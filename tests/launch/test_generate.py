# SPDX-License-Identifier: Apache-2.0
"""scripts/generate.py scores answers by row."""

from launching import read_json, read_rows, script


def test_answers_are_scored(tiny, tmp_path):
    words = ["--file", tiny / "data" / "test.jsonl", "--max_new_tokens", 8]
    words += ["--output", tmp_path / "answers.jsonl", "--json", tmp_path / "score.json"]
    script("generate", tiny / "model", *words, code=0)
    score = read_json(tmp_path / "score.json")
    answers = read_rows(tmp_path / "answers.jsonl")
    assert score["rows"] == len(answers) == 21 and len(score["skills"]) == 7
    assert score["correct"] == sum(answer["answer"] == answer["reference"] for answer in answers)
