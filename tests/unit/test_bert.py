"""Labels become classes or numbers, one that does not fit is named, and metrics and loss are those of all rows,
however they are cut into batches (recipes/bert.py).

In process. Expected values are worked out by hand, or by torch's own loss.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    RobertaConfig,
    RobertaModel,
)

import bert
from components.classifier import load_classifier, weighted_row_losses
from components.cli import parse_arguments
from components.labels import label_metrics
from components.rows import describe_rows
from fakes import fake_accelerator

TEXTS = {
    "one text": {"text": "the tea was good"},
    "another column": {"sentence": "the tea was good"},
    "a pair": {"sentence1": "the tea", "sentence2": "was good"},
    "a pair of another data set": {"premise": "the tea", "hypothesis": "was good"},
}


@pytest.fixture
def tokenizer(tiny_of):
    return AutoTokenizer.from_pretrained(tiny_of("bert") / "model")


@pytest.fixture
def load(tiny_of, tokenizer, tmp_path):
    """A function from training rows, evaluation rows and flags to what `load_data` finds: both tables, the
    names of the classes and what the start summary says."""

    def load(train, held_out=None, *flags, suffix="jsonl"):
        files = []
        for name, found in (("train", train), ("test", held_out)):
            path = tmp_path / f"{name}.{suffix}"
            if found is not None and suffix == "jsonl":
                path.write_text("".join(json.dumps(row) + "\n" for row in found))
            elif found is not None:
                found = found if isinstance(found, Dataset) else Dataset.from_list(found)
                {"csv": found.to_csv, "parquet": found.to_parquet}[suffix](path)
            files += [path] if found is not None else []
        names = [
            "--dataset_name",
            files[0],
            *(["--eval_dataset_name", files[1]] if len(files) > 1 else []),
        ]
        model = [
            "--model_name_or_path",
            tiny_of("bert") / "model",
            "--output_dir",
            tmp_path / "run",
        ]
        words = [str(word) for word in [*model, *names, *flags]]
        args = parse_arguments(bert.Arguments, words=words)
        train_rows, eval_rows, classes = bert.load_data(args, tokenizer)
        told = describe_rows(train_rows, eval_rows) | {"labels": classes.describe()}
        return train_rows.dataset, eval_rows and eval_rows.dataset, classes.names, told

    return load


def rows_of(labels, text="the tea was good"):
    return [{"text": f"{text} {number}", "label": label} for number, label in enumerate(labels)]


def tokenize(row, tokenizer, columns=None, label_column="label", names=None, max_length=64):
    return bert.tokenize_text(row, tokenizer, max_length, columns, label_column, names)


@pytest.mark.parametrize("name", TEXTS)
def test_the_usual_columns_are_found(name, tokenizer):
    row = tokenize({**TEXTS[name], "label": "a", "number": 1}, tokenizer)
    assert tokenizer.decode(row["input_ids"]).count("[SEP]") == len(TEXTS[name])
    assert (sum(row["token_type_ids"]) > 0) == (len(TEXTS[name]) == 2)


def test_other_columns_can_be_named(tokenizer):
    row = {"title": "the tea", "text": "was good", "topic": 3}
    named = tokenize(row, tokenizer, ["title", "text"], "topic")
    assert (
        tokenizer.decode(named["input_ids"]) == "[CLS] the tea [SEP] was good [SEP]"
        and named["label_text"] == "3"
    )


def test_a_long_text_loses_its_end_and_says_so(tokenizer):
    row = tokenize({"text": "good " * 30, "label": 1}, tokenizer, max_length=8)
    assert (
        row["truncated"] and row["length"] == 8 and row["input_ids"][-1] == tokenizer.sep_token_id
    )


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"label": "a"}, "has the columns label; needs text, label"),
        ({"text": "a"}, "has the columns text; needs text, label"),
        ({"text": 5, "label": "a"}, "has no text in text: 5"),
        ({"text": " ", "label": "a"}, "has no text in text"),
        (
            {"sentence1": "a", "sentence2": None, "label": "a"},
            "has no text in sentence1 and sentence2",
        ),
        ({"text": "a", "label": None}, "has no label in label: None"),
        ({"text": "a", "label": " "}, "has no label in label"),
        ({"text": "a", "label": ["b"]}, "has no label in label: .'b'."),
        ({"text": "a", "label": float("nan")}, "has no label in label: nan"),
        ({"text": "a", "label": float("-inf")}, "has no label in label: -inf"),
    ],
    ids=str,
)
def test_rows_that_cannot_be_used_say_why(row, says, tokenizer):
    with pytest.raises(ValueError, match=says):
        tokenize(row, tokenizer)


def test_a_number_that_stands_for_no_class_is_no_label(tokenizer):
    assert (
        tokenize({"text": "a", "label": 1}, tokenizer, names=["no", "yes"])["label_text"] == "yes"
    )
    for number in (-1, 2):
        with pytest.raises(ValueError, match="has no label"):
            tokenize({"text": "a", "label": number}, tokenizer, names=["no", "yes"])


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (["b", "a", "c", "a"], ["a", "b", "c"]),  # names by the alphabet
        ([10, 9, 2, 9], ["2", "9", "10"]),  # numbers by their size
        ([True, False], ["False", "True"]),
        ([0.5, 1.0, 2], []),  # numbers to learn
    ],
    ids=str,
)
def test_labels_say_what_is_learnt(labels, names, load):
    train_rows, _, found, told = load(rows_of(labels))
    assert found == names
    by_hand = labels if not names else [names.index(str(label)) for label in labels]
    assert train_rows["labels"][:].tolist() == by_hand and train_rows["weights"][:].tolist() == [
        1.0
    ] * len(labels)
    assert told["labels"] == "numbers" or told["labels"].startswith(
        f"{len(names)} classes: {names[0]} "
    )


def test_what_the_labels_say_can_be_overruled(load):
    assert load(rows_of([1, 2, 4]), None, "--problem_type", "regression")[2] == []
    assert load(rows_of([2.0, 1.5]), None, "--problem_type", "single_label_classification")[2] == [
        "1.5",
        "2",
    ]


def test_a_data_set_that_numbers_its_classes_keeps_their_order(load):
    kinds = ClassLabel(names=["some", "none", "all"])
    found = Dataset.from_list(
        rows_of([2, 0, 1, 0]), features=Features({"text": Value("string"), "label": kinds})
    )
    train_rows, _, names, _ = load(found, None, suffix="parquet")
    assert list(names) == ["some", "none", "all"] and train_rows["labels"][:].tolist() == [
        2,
        0,
        1,
        0,
    ]


def test_texts_of_a_csv_file_may_look_like_numbers(load):
    train_rows, _, names, _ = load(
        [{"text": "007", "label": "a"}, {"text": "12", "label": "b"}], suffix="csv"
    )
    assert list(names) == ["a", "b"] and len(train_rows) == 2


UNFIT = {  # training labels, evaluation labels, flags: code, what is said
    "class of no training row": (
        ["a", "b"],
        ["a", "c"],
        [],
        65,
        ["test.jsonl, line 2", "'c'", "those have a, b"],
    ),
    "text among numbers": (
        [1.5, "b", 2.5],
        None,
        [],
        65,
        ["train.jsonl, line 2", "'b'", "is no number"],
    ),
    "text to evaluate on among numbers": (
        [1.5, 2.5],
        ["x"],
        [],
        65,
        ["test.jsonl, line 1", "'x'", "is no number"],
    ),
    "no label": (
        ["a", None, "b"],
        None,
        [],
        65,
        ["train.jsonl, line 2: has no label in label: None"],
    ),
    "one class": (["a", "a"], None, [], 65, ["all rows have the label 'a'"]),
    "weights of numbers": (
        [1.5, 2.5],
        None,
        ["--class_weights", "balanced"],
        64,
        ["has numbers to predict"],
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_labels_that_do_not_fit_are_named(name, load, capsys):
    train, held_out, flags, code, words = UNFIT[name]
    with pytest.raises(SystemExit) as end:
        load(rows_of(train), held_out and rows_of(held_out), *flags)
    message = capsys.readouterr().err
    assert end.value.code == code and all(word in message for word in words), message


def test_labels_that_do_not_fit_can_be_left_out(load):
    flags = ["--skip_bad_rows"]
    train_rows, eval_rows, names, told = load(
        rows_of(["a", None, "b"]), rows_of(["b", "c", "a"]), *flags
    )
    assert list(names) == ["a", "b"] and train_rows["row"][:].tolist() == eval_rows["row"][
        :
    ].tolist() == [1, 3]
    assert eval_rows["labels"][:].tolist() == [1, 0]
    assert "1 left out" in told["train rows"] and "1 more for their label" in told["eval rows"]


def test_balanced_weights_make_all_classes_weigh_the_same(load):
    train_rows, eval_rows, names, _ = load(
        rows_of(["a"] * 6 + ["b"] * 2 + ["c"]), rows_of(["c", "a"]), "--class_weights", "balanced"
    )
    weight = dict(
        zip(train_rows["label_text"][:].tolist(), train_rows["weights"][:].tolist(), strict=True)
    )
    assert weight == pytest.approx(
        {"a": 9 / 18, "b": 9 / 6, "c": 9 / 3}
    )  # rows / (classes x rows of the class)
    assert sum(train_rows["weights"][:]) == pytest.approx(9)
    assert eval_rows["weights"][:].tolist() == pytest.approx([3, 0.5])  # those of the training rows


def test_the_label_is_part_of_what_a_resumed_run_compares(tokenizer):
    first, second = (tokenize({"text": "a", "label": label}, tokenizer) for label in ("x", "y"))
    assert first["input_ids"] == second["input_ids"] and first["hash"] != second["hash"]


# ---- Batches, loss, metrics ----
def collate(tokenizer, rows, numbers):
    return bert.TextCollator(DataCollatorWithPadding(tokenizer))(rows, [[row] for row in numbers])


def batch_of(load, tokenizer, numbers, labels, *flags):
    train_rows = load(rows_of(labels), None, *flags)[0]
    return collate(tokenizer, train_rows, numbers)


def test_a_new_head_of_two_layers_is_trained_beside_adapters(tmp_path):
    """As RoBERTa's and ELECTRA's: to peft it is one module, "classifier"."""
    shape = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    RobertaModel(RobertaConfig(**shape, vocab_size=9, max_position_embeddings=16)).save_pretrained(
        tmp_path
    )
    words = ["--model_name_or_path", str(tmp_path), "--use_peft"]
    args = parse_arguments(bert.Arguments, words=words)
    model = load_classifier(
        AutoModelForSequenceClassification,
        args,
        ["a", "b"],
        fake_accelerator(),
        task_type="SEQ_CLS",
    )
    model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([1])).loss.backward()
    gradients = {
        name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad
    }
    assert sum("classifier" in name for name in gradients) == 4
    assert all(
        gradient is not None and gradient.any()
        for name, gradient in gradients.items()
        if "lora_A" not in name
    )


def test_a_batch_is_padded_to_its_longest_row(load, tokenizer):
    train_rows = load(
        [
            {"text": text, "label": label}
            for text, label in (("good", "a"), ("the tea was bad", "b"))
        ]
    )[0]
    batch = collate(tokenizer, train_rows, [0, 1])
    assert batch["inputs"]["attention_mask"].tolist() == [[1, 1, 1, 0, 0, 0], [1] * 6]
    assert (
        batch["inputs"]["input_ids"][0, 3:].tolist() == [0, 0, 0]
        and batch["inputs"]["token_type_ids"].sum() == 0
    )
    assert (
        batch["counts"].tolist() == [2, 9]
        and batch["row"] == [1, 2]
        and batch["labels"].tolist() == [0, 1]
    )


@pytest.mark.parametrize(
    ("labels", "kind"), [(["a", "b"], torch.int64), ([0.5, 2.0], torch.float32)], ids=str
)
def test_a_rank_without_rows_takes_part_and_counts_nothing(labels, kind, load, tokenizer, tiny_of):
    batch = batch_of(load, tokenizer, [], labels)
    assert batch["inputs"]["input_ids"].shape == (1, 1) and batch["counts"].tolist() == [0, 0]
    assert batch["labels"].dtype == kind and len(batch["labels"]) == 0
    outputs = 2 if kind == torch.int64 else 1
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_of("bert") / "model", num_labels=outputs
    )
    loss, logits = weighted_row_losses(model, batch)
    loss.backward()
    assert loss == 0 and logits.shape == (0, outputs)
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


@pytest.mark.parametrize("weights", ["none", "balanced"])
def test_the_loss_is_torchs_weighted_mean_however_rows_are_cut(weights, load, tokenizer):
    labels = ["a"] * 5 + ["b"] * 2 + ["c"]
    logits = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    total, weight, counted = 0.0, 0.0, None
    for numbers in ([0, 1, 2], [3, 4, 5, 6], [], [7]):
        batch = batch_of(load, tokenizer, numbers, labels, "--class_weights", weights)
        of_batch = logits[numbers or [0]]  # a model runs on a row of padding where there is none
        total += weighted_row_losses(
            lambda logits=of_batch, **_: SimpleNamespace(logits=logits), batch
        )[0]
        weight += batch["counts"][0]
    if weights == "balanced":
        counted = torch.tensor([8 / 15, 8 / 6, 8 / 3])
    wanted = torch.nn.CrossEntropyLoss(weight=counted)(
        logits, torch.tensor([0] * 5 + [1] * 2 + [2])
    )
    assert (total / weight).item() == pytest.approx(wanted.item(), rel=1e-6)


def metrics(predicted, true):
    return label_metrics(torch.tensor(predicted), torch.tensor(true))


def test_accuracy_and_f1_are_those_of_the_rows():
    # Class 0: 2 right of 3 told, 3 true: F1 2/3. Classes 1 and 2: 1 right, 2, 2: 1/2. Class 3 does not occur, 4 does
    found = metrics([0, 0, 1, 1, 2, 0, 2, 4], [0, 0, 0, 1, 1, 2, 2, 4])
    assert found == pytest.approx(
        {"eval_accuracy": 5 / 8, "eval_f1": (2 / 3 + 1 / 2 + 1 / 2 + 1) / 4}
    )


def test_a_class_that_is_told_and_never_true_lowers_f1():
    found = metrics([0, 0, 1], [0, 0, 0])  # class 0: 2 right, 2 told, 3 true: 4/5; class 1: 0
    assert found == pytest.approx({"eval_accuracy": 2 / 3, "eval_f1": 0.4})


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_squared_error_and_correlation_are_those_of_the_rows(offset):
    true, told = np.array([1.0, 2, 3, 4, 5, 9]) + offset, np.array([1.5, 1, 3, 5, 4, 7]) + offset
    found = metrics(told.astype(np.float32), true.astype(np.float32))
    assert found["eval_mse"] == pytest.approx((0.25 + 1 + 0 + 1 + 1 + 4) / 6)
    assert found["eval_pearson"] == pytest.approx(np.corrcoef(true, told)[0, 1])


def test_equal_predictions_have_no_correlation():
    assert metrics([0.1] * 5, [1.0, 2, 3, 4, 5])["eval_pearson"] == 0
