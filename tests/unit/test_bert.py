# SPDX-License-Identifier: Apache-2.0
"""recipes/bert.py: texts and pairs of texts become tokens with a label, and batches of them."""

import json

import pytest
from datasets import Dataset, Value
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


def test_a_long_text_loses_its_end_and_says_so(tokenizer):
    row = tokenize({"text": "good " * 30, "label": 1}, tokenizer, max_length=8)
    assert row["truncated"] and row["length"] == 8
    assert row["input_ids"][-1] == tokenizer.sep_token_id


@pytest.mark.parametrize(
    ("row", "word"),
    [
        ({"text": "a"}, "label"),
        ({"label": 1}, "text"),
        ({"text": 5, "label": 1}, "5"),
        ({"text": " ", "label": 1}, "text"),
        ({"text": "a", "label": None}, "no label"),
    ],
)
def test_texts_and_labels_have_to_be_there(row, word, tokenizer):
    with pytest.raises(ValueError, match=word):
        tokenize(row, tokenizer)


# ---- Data sets ----
def load(tokenizer, train, *flags):
    words = ["--model_name_or_path", tokenizer.name_or_path, "--dataset_name", str(train), *flags]
    return bert.load_data(parse(bert.Arguments, words=words), tokenizer)


def test_rows_and_labels_that_do_not_fit_are_left_out_and_counted(tokenizer, tmp_path):
    for split, labels in (("train", ["a", None, "b"]), ("test", ["b", "c", "a"])):
        rows = [{"text": f"tea {number}", "label": label} for number, label in enumerate(labels)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_rows, eval_rows, classes = load(tokenizer, tmp_path, "--skip_bad_rows")
    assert train_rows.dataset["row"][:].tolist() == eval_rows.dataset["row"][:].tolist() == [1, 3]
    assert eval_rows.dataset["labels"][:].tolist() == [1, 0]
    notes = describe_rows(train_rows, eval_rows)
    assert "1 left out" in notes["train rows"] and "1 more for their label" in notes["eval rows"]
    assert describe_classes(classes) == "2 classes: a 1, b 1"


# ---- Batches ----
def collate(tokenizer, texts, numbers, weights=(1.0, 1.0)):
    rows = []
    for number, (text, weight) in enumerate(zip(texts, weights, strict=False), 1):
        row = tokenize({"text": text, "label": "a"}, tokenizer)
        rows.append(row | {"row": number, "labels": number - 1, "weights": weight})
    collator = bert.TextCollator(tokenizer)
    columns = Dataset.from_list(rows).select_columns(collator.columns)
    source = columns.cast_column("weights", Value("float32")).with_format("numpy")
    return collator(source, [[number] for number in numbers])


def test_a_batch_is_padded_to_its_longest_row(tokenizer):
    batch = collate(tokenizer, ["good", "the tea was bad"], [0, 1])
    assert batch["inputs"]["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert batch["inputs"]["input_ids"][0, 3:].tolist() == [0, 0, 0]
    assert batch["inputs"]["token_type_ids"].sum() == 0
    assert batch["counts"].tolist() == [2, 9] and batch["row"] == [1, 2]
    assert batch["labels"].tolist() == [0, 1]


def test_a_rank_without_rows_has_one_token_and_no_label(tokenizer):
    batch = collate(tokenizer, ["good"], [])
    assert batch["inputs"]["input_ids"].shape == (1, 1) and batch["counts"].tolist() == [0, 0]
    assert len(batch["labels"]) == 0 and batch["row"] == []
