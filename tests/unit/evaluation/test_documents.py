# SPDX-License-Identifier: Apache-2.0
"""Rows of a file as a model is asked them: prompts, and the tokens that are scored."""

import json

import pytest

from evaluation.contestants import find_contestants
from evaluation.documents import Reader

USER = {"role": "user", "content": "Spell the word lamp."}
ANSWER = {"role": "assistant", "content": "l-a-m-p"}
AGAIN = [{"role": "user", "content": "Again."}, {"role": "assistant", "content": "L-A"}]
CHOICES = {"prompt": "2 + 2?", "choices": ["3", "4", "five"], "answer": 1}
PAIR = {"prompt": "Spell the word lamp.", "completion": "l-a-m-p"}


@pytest.fixture
def read(adapters):
    """A function that reads a file of rows for a run."""

    def read_for(path, folder=adapters, pattern=None, max_new_tokens=8, limit=None):
        (contestant,) = find_contestants([str(folder)], with_base=False)
        return Reader(contestant, pattern, max_new_tokens).read(path, limit)

    return read_for


@pytest.fixture
def texts(adapters):
    """A function from a document to the texts of its scored parts, in a list for each choice."""
    (contestant,) = find_contestants([str(adapters)], with_base=False)

    def texts_of(document):
        found = []
        for scored in document.scored:
            parts = [scored.tokens[start:end] for start, end in scored.spans]
            found.append([contestant.tokenizer.decode(part) for part in parts])
        return found

    return texts_of


def test_the_answer_and_its_end_are_scored_after_the_prompt(read, write_rows, texts):
    (document,) = read(write_rows(PAIR))
    assert document.prompt.endswith("<|user|>Spell the word lamp.<|end_of_turn|><|assistant|>")
    assert document.reference == "l-a-m-p" and not document.choices
    assert texts(document) == [["l-a-m-p<|end_of_turn|>"]]


def test_every_answer_is_scored_and_the_last_one_asked_for(read, write_rows, texts):
    (document,) = read(write_rows({"messages": [USER, ANSWER, *AGAIN]}))
    assert "l-a-m-p" in document.prompt and document.reference == "L-A"
    assert texts(document) == [["l-a-m-p<|end_of_turn|>", "L-A<|end_of_turn|>"]]


def test_only_what_the_run_learned_is_scored(read, write_rows, texts, adapters, tmp_path):
    folder = with_arguments(adapters, tmp_path, learn="last")
    (document,) = read(write_rows({"messages": [USER, ANSWER, *AGAIN]}), folder)
    assert texts(document) == [["L-A<|end_of_turn|>"]]


def test_each_choice_is_scored_as_the_answer(read, write_rows, texts):
    (document,) = read(write_rows(CHOICES))
    assert document.choices == ["3", "4", "five"] and document.right == 1
    assert document.reference == "4"
    ends = [[f"{choice}<|end_of_turn|>"] for choice in document.choices]
    assert texts(document) == ends


def test_columns_of_the_run_need_not_be_named(read, write_rows, adapters, tmp_path):
    folder = with_arguments(adapters, tmp_path, columns=["prompt=q", "completion=a"])
    (document,) = read(write_rows({"q": "Spell.", "a": "s-p"}), folder)
    assert "Spell." in document.prompt and document.reference == "s-p"
    (document,) = read(write_rows({"q": "Spell.", "choices": ["x", "y"], "answer": 1}), folder)
    assert "Spell." in document.prompt and document.reference == "y"


def test_a_row_that_the_recipe_would_cut_says_so(read, write_rows, adapters, tmp_path):
    folder = with_arguments(adapters, tmp_path, max_length=8)
    (document,) = read(write_rows(PAIR | {"prompt": "a", "completion": "lamp " * 20}), folder)
    assert document.truncated and len(document.scored[0].tokens) == 8


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"prompt"', "not JSON"),
        ({"prompt": "a"}, "completion"),
        ({"question": "a", "number": 2}, "needs"),
        (PAIR | {"prompt": "lamp " * 200}, "no answer within --max_length 128"),
        (PAIR | {"completion": "none"}, "does not match --answer_pattern"),
    ],
)
def test_a_bad_row_is_named_with_its_file_and_line(row, says, read, write_rows, refused):
    path = write_rows(PAIR, row)
    code, line = refused(lambda: read(path, pattern="(l-a-.*)"))
    assert code == 65 and f"{path}, line 2" in line and says in line


def test_a_prompt_with_less_room_than_the_longest_answer_names_the_fix(read, write_rows, refused):
    path = write_rows(PAIR)
    code, line = refused(lambda: read(path, max_new_tokens=120))
    room = int(line.rpartition("--max_new_tokens ")[2])
    assert code == 65 and len(read(path, max_new_tokens=room)) == 1


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
