# SPDX-License-Identifier: Apache-2.0
"""The rows of llama.py and mixtral.py, in each form, become the same conversation."""

import dataclasses
import inspect
import json
import re

import datasets
import pytest
from transformers import AutoTokenizer

import llama
import llama_dpo
import mixtral
import t5
from components.chat_template import ChatTemplate
from components.cli import parse_arguments

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


def test_the_input_of_an_instruction_follows_it(recipe):
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert recipe.row_to_conversation(row).messages[0]["content"] == "Add.\n\n1 and 2"


def test_half_a_character_is_refused(recipe, template):
    with pytest.raises(UnicodeEncodeError, match="surrogates not allowed"):
        recipe.tokenize_row({"prompt": QUESTION, "completion": "l\ud800"}, template, 1024)


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
        rows, _ = recipe.load_data(parse_arguments(recipe.Arguments, words=words), tokenizer)
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


def test_only_the_columns_that_are_named_count(load):
    expected, _ = load({"prompt": QUESTION, "completion": ANSWER})
    row = {"prompt": "a", "completion": "b", "q": QUESTION, "a": ANSWER}
    assert load(row, "question=q", "answer=a")[0] == expected
    row = {**ROWS["messages"], "prompt": "a", "completion": "b", "q": QUESTION, "a": ANSWER}
    assert load(row, "prompt=q", "completion=a")[0] == expected


def test_rows_that_other_columns_made_are_not_read_from_the_cache(load):
    row = {"question": QUESTION, "answer": ANSWER, "other": "9-9-9"}
    first, _ = load(row, "prompt=question", "completion=answer")
    second, _ = load(row, "prompt=question", "completion=other")
    assert ANSWER in first and "9-9-9" in second and ANSWER not in second


def test_a_column_that_no_row_has_is_named_once(load, capsys):
    with pytest.raises(SystemExit, match="65"):
        load({"question": QUESTION, "answer": ANSWER}, "prompt=qestion", "completion=answer")
    message = capsys.readouterr().err
    assert "has no column qestion" in message and "did you mean question?" in message


def example_of(recipe):
    """The lines of the example in load_data: a filter."""
    comment = inspect.getsource(recipe.load_data).partition("# EDIT: to filter rows")[2]
    return re.findall(r"^    #     (.*)$", comment, re.MULTILINE)


def test_the_recipes_show_the_same_example_of_a_filter():
    examples = [example_of(recipe) for recipe in (llama, mixtral, llama_dpo, t5)]
    assert examples[0] and all(example == examples[0] for example in examples)


def test_the_example_of_a_filter_works(recipe, tokenizer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = json.dumps({"prompt": QUESTION, "completion": ANSWER}) + "\n"
    short = json.dumps({"prompt": "a", "completion": "b"}) + "\n"
    (tmp_path / "rows.jsonl").write_text(2 * row + short)
    args = parse_arguments(recipe.Arguments, words=["--dataset_name", "rows.jsonl"])
    keep, *edits = example_of(recipe)
    assert keep == "train_rows, eval_rows = read_splits(...)"
    assert 'row["length"] >= 8' in edits[0]
    edits[0] = edits[0].replace("8", "15")  # between the lengths of the two kinds of rows
    source = inspect.getsource(recipe.load_data).replace(
        "return read_splits(", "train_rows, eval_rows = read_splits("
    )
    source += "".join(f"    {line}\n" for line in edits)
    names = vars(recipe) | {"dataclasses": dataclasses, "datasets": datasets}
    exec(source, names)
    train_rows, eval_rows = names["load_data"](args, tokenizer)
    assert len(train_rows) == 2 and eval_rows is None
    assert (train_rows.column("length") >= 15).all()
    assert train_rows.dataset[0]["input_ids"].dtype.kind == "i"  # still in numpy's format
