# SPDX-License-Identifier: Apache-2.0
"""recipes/bert.py: texts and pairs of texts become tokens with a label, and batches of them."""

import json

import pytest
from datasets import ClassLabel, Dataset, Features, Value
from transformers import AutoTokenizer

import bert
from components.cli import parse_arguments
from components.rows import describe_rows

TEXTS = {
    "one text": {"text": "the tea was good"},
    "another column": {"sentence": "the tea was good"},
    "a pair": {"sentence1": "the tea", "sentence2": "was good"},
    "a pair of another data set": {"premise": "the tea", "hypothesis": "was good"},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_of):
    return AutoTokenizer.from_pretrained(tiny_of("bert") / "model")


def tokenize(row, tokenizer, columns=None, label_column="label", names=None, max_length=64):
    return bert.tokenize_text(row, tokenizer, max_length, columns, label_column, names)


# ---- Rows ----
@pytest.mark.parametrize("name", TEXTS)
def test_the_usual_columns_are_found(name, tokenizer):
    row = tokenize({**TEXTS[name], "label": "a", "number": 1}, tokenizer)
    assert tokenizer.decode(row["input_ids"]).count("[SEP]") == len(TEXTS[name])
    assert (sum(row["token_type_ids"]) > 0) == (len(TEXTS[name]) == 2)


def test_other_columns_can_be_named(tokenizer):
    row = {"title": "the tea", "text": "was good", "topic": 3}
    named = tokenize(row, tokenizer, ["title", "text"], "topic")
    assert tokenizer.decode(named["input_ids"]) == "[CLS] the tea [SEP] was good [SEP]"
    assert named["label_text"] == "3"


def test_a_long_text_loses_its_end_and_says_so(tokenizer):
    row = tokenize({"text": "good " * 30, "label": 1}, tokenizer, max_length=8)
    assert row["truncated"] and row["length"] == 8
    assert row["input_ids"][-1] == tokenizer.sep_token_id


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"label": "a"}, "has the columns label; needs text, label"),
        ({"text": " ", "label": "a"}, "has no text in text"),
        (
            {"sentence1": "a", "sentence2": None, "label": "a"},
            "has no text in sentence1 and sentence2",
        ),
        ({"text": "a", "label": None}, "has no label in label: None"),
        ({"text": "a\ud800", "label": "a"}, "surrogates not allowed"),
    ],
    ids=["no column", "no text", "half a pair", "no label", "half a character"],
)
def test_rows_that_cannot_be_used_say_why(row, says, tokenizer):
    with pytest.raises(ValueError, match=says):
        tokenize(row, tokenizer)


def test_the_label_is_part_of_what_a_resumed_run_compares(tokenizer):
    first, second = (tokenize({"text": "a", "label": label}, tokenizer) for label in ("x", "y"))
    assert first["input_ids"] == second["input_ids"] and first["hash"] != second["hash"]


# ---- Data sets ----
def load(tokenizer, train, *flags):
    words = ["--dataset_name", str(train), *map(str, flags)]
    return bert.load_data(parse_arguments(bert.Arguments, words=words), tokenizer)


def test_rows_and_labels_that_do_not_fit_are_left_out_and_counted(tokenizer, tmp_path):
    for split, labels in (("train", ["a", None, "b"]), ("test", ["b", "c", "a"])):
        rows = [{"text": f"tea {number}", "label": label} for number, label in enumerate(labels)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    train_rows, eval_rows, classes = load(tokenizer, tmp_path, "--skip_bad_rows")
    assert train_rows.dataset["row"][:].tolist() == eval_rows.dataset["row"][:].tolist() == [1, 3]
    assert eval_rows.dataset["labels"][:].tolist() == [1, 0]
    notes = describe_rows(train_rows, eval_rows)
    assert "1 left out" in notes["train rows"] and "1 more for their label" in notes["eval rows"]
    assert classes.describe() == "2 classes: a 1, b 1"


def test_a_data_set_that_numbers_its_classes_keeps_their_order(tokenizer, tmp_path):
    kinds = Features({"text": Value("string"), "label": ClassLabel(names=["some", "none", "all"])})
    rows = [{"text": f"tea {label}", "label": label} for label in (2, 0, 1, 0)]
    Dataset.from_list(rows, features=kinds).to_parquet(tmp_path / "train.parquet")
    train_rows, _, classes = load(tokenizer, tmp_path / "train.parquet")
    assert classes.names == ["some", "none", "all"]
    assert train_rows.dataset["labels"][:].tolist() == [2, 0, 1, 0]


def test_texts_of_a_csv_file_may_look_like_numbers(tokenizer, tmp_path):
    (tmp_path / "train.csv").write_text("text,label\n007,a\n12,b\n")
    train_rows, _, classes = load(tokenizer, tmp_path / "train.csv")
    assert classes.names == ["a", "b"] and len(train_rows) == 2


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


def test_a_batch_counts_the_weights_of_its_classes(tokenizer):
    batch = collate(tokenizer, ["good", "the tea was bad"], [0, 1], weights=(0.5, 4.0))
    assert batch["weights"].tolist() == [0.5, 4] and batch["counts"].tolist() == [4.5, 9]


def test_a_rank_without_rows_has_one_token_and_no_label(tokenizer):
    batch = collate(tokenizer, ["good"], [])
    assert batch["inputs"]["input_ids"].shape == (1, 1) and batch["counts"].tolist() == [0, 0]
    assert len(batch["labels"]) == 0 and batch["row"] == []
