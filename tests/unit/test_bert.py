# SPDX-License-Identifier: Apache-2.0
"""recipes/bert.py: texts and pairs of texts become tokens with a label."""

import json

import pytest
from transformers import AutoTokenizer

import bert
from core.cli import parse
from core.data import describe_rows
from tasks.labels import describe_classes

TEXTS = {
    "one text": {"text": "the tea was good"},
    "another column": {"sentence": "the tea was good"},
    "a pair": {"sentence1": "the tea", "sentence2": "was good"},
    "a pair of another data set": {"premise": "the tea", "hypothesis": "was good"},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_of):
    return AutoTokenizer.from_pretrained(tiny_of("bert") / "model")


def tokenize(row, tokenizer, columns=None, label_column="label", max_length=64):
    return bert.tokenize_text(row, tokenizer, max_length, columns, label_column)


# ---- Rows ----
@pytest.mark.parametrize("name", TEXTS)
def test_the_usual_columns_are_found(name, tokenizer):
    row = tokenize({**TEXTS[name], "label": "a", "number": 1}, tokenizer)
    assert tokenizer.decode(row["input_ids"]).count("[SEP]") == len(TEXTS[name])
    assert (sum(row["token_type_ids"]) > 0) == (len(TEXTS[name]) == 2)


# ---- Data sets ----
def load(tokenizer, train, *flags):
    words = ["--model_name_or_path", tokenizer.name_or_path, "--dataset_name", str(train), *flags]
    return bert.load_data(parse(bert.Arguments, words=words), tokenizer)


def test_labels_stay_with_their_texts_where_rows_are_left_out(tokenizer, tmp_path):
    for split, labels in (("train", ["a", None, "b"]), ("test", ["b", None, "a"])):
        rows = [{"text": f"tea {number}", "label": label} for number, label in enumerate(labels)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_rows, eval_rows, classes = load(tokenizer, tmp_path, "--skip_bad_rows")
    assert train_rows.dataset["row"][:].tolist() == eval_rows.dataset["row"][:].tolist() == [1, 3]
    assert eval_rows.dataset["labels"][:].tolist() == [1, 0]
    notes = describe_rows(train_rows, eval_rows)
    assert "1 left out" in notes["train rows"] and "1 left out" in notes["eval rows"]
    assert describe_classes(classes) == "2 classes: a 1, b 1"
