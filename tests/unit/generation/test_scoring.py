# SPDX-License-Identifier: Apache-2.0
"""Exact match, of the whole text or of what a pattern finds in it."""

import json

import pytest

from core.chat import Conversation
from generation import scoring
from generation.questions import Question
from generation.scoring import Answered


@pytest.mark.parametrize(
    ("answer", "reference", "pattern", "expected"),
    [
        ("7", "7", None, True),
        ("7 ", "7", None, False),
        ("so #### 7 ", "#### 7", "#### (.+)", True),
        ("#### 8", "#### 7", "#### (.+)", False),
        ("7", "#### 7", "#### (.+)", False),
    ],
)
def test_texts_match(answer, reference, pattern, expected):
    assert scoring.is_match(answer, reference, pattern) is expected


@pytest.fixture
def answered():
    """Three answers, two of them to questions of a skill."""
    asked = Conversation([{"role": "user", "content": "a"}], tools=[], is_trained_on=[False])
    first = Answered(Question(asked, "b", "spell"), "b", True)
    second = Answered(Question(asked, "b", "spell"), "c", False)
    third = Answered(Question(asked, "b", None), "b", True)
    return [first, second, third]


def test_the_score_counts_all_rows_and_each_skill(answered):
    assert scoring.score(answered) == {
        "exact_match": 2 / 3,
        "correct": 2,
        "rows": 3,
        "skills": {"spell": 0.5},
    }


def test_the_last_line_is_the_exact_match(answered, capsys):
    scoring.print_answers(answered)
    scoring.print_score(answered)
    assert capsys.readouterr().out.splitlines() == [
        "a -> b (right)",
        "a -> c (wrong, should be: b)",
        "a -> b (right)",
        "spell: 0.5000 (1/2)",
        "exact match: 0.6667 (2/3)",
    ]


def test_answers_are_written_one_per_line(answered, tmp_path):
    scoring.write_answers(tmp_path / "answers.jsonl", answered)
    lines = (tmp_path / "answers.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "messages": [{"role": "user", "content": "a"}],
        "reference": "b",
        "skill": "spell",
        "answer": "c",
        "correct": False,
    }
