# SPDX-License-Identifier: Apache-2.0
"""Saved conversations are rows that the recipe reads, beside those that a file already has."""

import json

import pytest

from chatting.history import History, Turn
from chatting.rows import save_row
from core.chat import read_conversation
from generation.answering import Ending, Reply
from generation.rows import load_questions


def conversation(answer="yes", ending=Ending.COMPLETE):
    return History("Be brief.", [Turn('Größe "東京"?\n\x1b🙂', {0: Reply(answer, ending)})])


def read_lines(path):
    return [json.loads(line) for line in path.read_text().split("\n") if line]


def test_a_saved_row_is_one_that_the_recipe_trains_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    assert save_row(conversation(), path) == 1
    (row,) = read_lines(path)
    read = read_conversation(row, formats={})
    assert read.messages == conversation().messages()
    assert read.is_trained_on == [False, False, True]
    (question,) = load_questions(path)
    assert question.reference == "yes"


def test_rows_are_added_and_none_is_lost(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n\n')
    assert save_row(conversation("one"), path) == 2
    assert save_row(conversation("two"), path) == 3
    rows = read_lines(path)
    assert rows[0] == {"prompt": "a", "completion": "b"}
    assert [row["messages"][-1]["content"] for row in rows[1:]] == ["one", "two"]


def test_a_row_without_its_end_of_line_stays_a_row_of_its_own(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}')
    assert save_row(conversation(), path) == 2
    assert len(read_lines(path)) == 2


@pytest.mark.parametrize(
    ("history", "name", "problem"),
    [
        (History(), "rows.jsonl", "nothing was said yet"),
        (conversation(), "rows.json", "must end in .jsonl"),
        (conversation("ye", Ending.STOPPED), "rows.jsonl", "only complete answers are trained on"),
        (conversation(""), "rows.jsonl", "only complete answers are trained on"),
    ],
    ids=["nothing said", "other kind of file", "stopped", "empty"],
)
def test_what_cannot_be_trained_on_is_refused_and_writes_nothing(history, name, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        save_row(history, tmp_path / name)
    assert list(tmp_path.iterdir()) == []
