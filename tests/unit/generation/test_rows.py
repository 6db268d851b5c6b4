# SPDX-License-Identifier: Apache-2.0
"""Rows of a file become questions; a bad row is named with its file and line."""

import pytest

from generation.rows import is_match, load_questions
from launching import write_rows


def test_the_last_answer_is_the_reference(tmp_path):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": " d "},
    ]
    row = {"messages": messages, "skill": "letters"}
    rows = write_rows(tmp_path / "rows.jsonl", [row])
    (question,) = load_questions(rows, {})
    assert question.conversation.messages == messages[:3]
    assert (question.reference, question.skill) == ("d", "letters")


def test_a_row_is_read_by_the_columns_of_the_run_where_it_has_them(tmp_path):
    rows = [{"frage": "a", "antwort": "b"}, {"prompt": "c", "completion": "d"}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    arguments = {"columns": ["prompt=frage", "completion=antwort", "chosen=c"]}
    questions = load_questions(path, arguments)
    found = [
        (question.conversation.messages[0]["content"], question.reference) for question in questions
    ]
    assert found == [("a", "b"), ("c", "d")]


def test_a_column_that_the_run_names_is_text_even_if_it_looks_like_a_number(tmp_path):
    (tmp_path / "rows.csv").write_text("frage,antwort\nadd,01\n")
    arguments = {"columns": ["prompt=frage", "completion=antwort"]}
    (question,) = load_questions(tmp_path / "rows.csv", arguments)
    assert question.reference == "01"


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
    assert is_match(answer, reference, pattern) is expected
