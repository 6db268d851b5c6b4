# SPDX-License-Identifier: Apache-2.0
"""The rows of llama.py and mixtral.py, in each form, become the same conversation."""

import json

import datasets
import pytest
from transformers import AutoTokenizer

import llama
import mixtral
from core.chat import ChatTemplate
from core.cli import parse

QUESTION = "Spell the word lamp."
ANSWER = "l-a-m-p"
ROWS = {
    "messages": {
        "messages": [
            {"role": "user", "content": QUESTION},
            {"role": "assistant", "content": ANSWER},
        ]
    },
    "prompt, completion": {"prompt": QUESTION, "completion": ANSWER},
    "instruction, output": {"instruction": QUESTION, "output": ANSWER},
    "question, answer": {"question": QUESTION, "answer": ANSWER},
}


@pytest.fixture(scope="module")
def tokenizer(tiny):
    return AutoTokenizer.from_pretrained(tiny / "model")


@pytest.fixture(scope="module")
def template(tokenizer):
    return ChatTemplate(tokenizer)


@pytest.fixture(params=[llama, mixtral], ids=lambda recipe: recipe.__name__)
def recipe(request):
    return request.param


@pytest.mark.parametrize("form", ROWS)
def test_all_forms_become_the_same_row(form, recipe, tokenizer, template):
    row = recipe.tokenize_row(ROWS[form], template, 1024)
    assert row == recipe.tokenize_row(ROWS["messages"], template, 1024)
    trained_on = [token for token in row["labels"] if token != -100]
    assert tokenizer.decode(trained_on) == ANSWER + "<|end_of_turn|>"


# ---- Columns with other names ----
@pytest.fixture
def load(recipe, tokenizer, tmp_path, monkeypatch):
    """A function that prepares a row of a file, with these columns, as it was tokenized."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def load_row(row, *columns):
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps(row))
        words = ["--dataset_name", str(file)]
        if columns:
            words += ["--columns", *columns]
        rows, _ = recipe.load_data(parse(recipe.Arguments, words=words), tokenizer)
        return tokenizer.decode(rows.dataset[0]["input_ids"]), rows.notes

    return load_row


def test_columns_of_any_name_become_the_same_row(load):
    expected, _ = load({"prompt": QUESTION, "completion": ANSWER})
    row = {"frage": QUESTION, "antwort": ANSWER, "quelle": "a"}
    found, notes = load(row, "prompt=frage", "completion=antwort")
    assert found == expected and notes.endswith("not read: quelle")
    assert load({"chat": ROWS["messages"]["messages"]}, "messages=chat")[0] == expected
    row = {"aufgabe": "Spell the", "input": "word lamp.", "antwort": ANSWER}
    found, _ = load(row, "instruction=aufgabe", "output=antwort")
    assert "Spell the\n\nword lamp." in found
