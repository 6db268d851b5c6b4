# SPDX-License-Identifier: Apache-2.0
"""Words become tokens that carry their tags, and a row that does not fit is named; the loss is that
of all labeled tokens, however rows are cut into batches (recipes/bert_ner.py).

In process. Expected values are worked out by hand, or by torch's own loss. The metrics:
tasks/test_entities.py.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, List, Value
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForTokenClassification,
)

import bert_ner
from core.cli import parse
from tasks.tags import NO_WORD, label_tokens, summed_tag_loss, tag_words

NAMES = ["O", "B-PER", "I-PER"]
NUMBER_OF = {name: number for number, name in enumerate(NAMES)}


@pytest.fixture
def tokenizer(tiny_of):
    return AutoTokenizer.from_pretrained(tiny_of("bert_ner") / "model")


@pytest.fixture
def load(tiny_of, tokenizer, tmp_path, monkeypatch):
    """A function from training rows, evaluation rows and flags to what `load_data` finds."""

    def load(train, held_out=None, *flags, model=None):
        words = ["--model_name_or_path", model or tiny_of("bert_ner") / "model"]
        for name, flag, found in (
            ("train", "--dataset_name", train),
            ("test", "--eval_dataset_name", held_out),
        ):
            if isinstance(found, Dataset):
                path = tmp_path / f"{name}.parquet"
                found.to_parquet(path)
            elif found is not None:
                path = tmp_path / f"{name}.jsonl"
                path.write_text("".join(json.dumps(row) + "\n" for row in found))
            if found is not None:
                words += [flag, path]
        words += ["--output_dir", tmp_path / "run", *flags]
        args = parse(bert_ner.Arguments, words=[str(word) for word in words])
        return bert_ner.load_data(args, tokenizer)

    return load


def row_of(tags, column="ner_tags"):
    return {"tokens": [f"word{place}" for place in range(len(tags))], column: tags}


# ---- Names of tags ----
def test_a_data_set_that_numbers_its_tags_keeps_their_order(load):
    features = Features(
        {"tokens": List(Value("string")), "ner_tags": List(ClassLabel(names=NAMES))}
    )
    rows = Dataset.from_list([row_of([1, 0]), row_of([0])], features=features)
    train_rows, eval_rows, tag_ids = load(rows, [row_of(["I-PER"])])
    assert tag_ids == NUMBER_OF
    assert train_rows.dataset["tags"][0].tolist() == ["B-PER", "O"]
    assert eval_rows.dataset["tags"][0].tolist() == ["I-PER"]  # a name, though no row is trained on


@pytest.fixture
def tagger(tiny_of, tokenizer, tmp_path):
    """The folder of a model that was trained on NAMES."""
    folder = tmp_path / "tagger"
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = BertConfig(
        **sizes, intermediate_size=8, vocab_size=320, id2label=dict(enumerate(NAMES))
    )
    BertForTokenClassification(config).save_pretrained(folder)
    return folder


def test_a_model_that_was_trained_on_the_tags_keeps_their_order(load, tagger):
    assert load([row_of(["B-PER", "O"])], model=tagger)[2] == NUMBER_OF
    assert load([row_of([2, 0])], model=tagger)[0].dataset["tags"][0].tolist() == ["I-PER", "O"]
    others = load([row_of(["B-LOC", "O"])], model=tagger)[2]
    assert others == {"B-LOC": 0, "O": 1}


# ---- Labels of tokens ----
WORD_IDS = np.array([NO_WORD, 0, 0, 1, 2, 2, 2, NO_WORD])


@pytest.mark.parametrize(
    ("all_tokens", "labels"),
    [
        (False, [-100, 1, -100, 2, 0, -100, -100, -100]),
        (True, [-100, 1, 2, 2, 0, 0, 0, -100]),
    ],
)
def test_the_first_token_of_a_word_carries_its_tag_or_all_do(all_tokens, labels):
    found = label_tokens(WORD_IDS, ["B-PER", "I-PER", "O"], NUMBER_OF, all_tokens)
    assert found.tolist() == labels


def test_a_word_has_the_tag_of_its_first_token_and_one_without_tokens_has_none():
    numbers = np.array([0, 1, 2, 2, 0, 2, 2, 1, 1, 1])  # two more: padding
    assert tag_words(numbers, WORD_IDS, NAMES, 4) == ["B-PER", "I-PER", "O", "O"]


# ---- Batches and loss ----
def collate(tokenizer, rows, numbers, all_tokens=False):
    tag_ids = {"B-PER": 1, "I-PER": 2, "O": 0}
    collator = bert_ner.TagCollator(tokenizer, tag_ids, all_tokens)
    return collator(rows.dataset, [[number] for number in numbers])


@pytest.mark.parametrize("all_tokens", [False, True], ids=["first tokens", "all tokens"])
def test_the_loss_is_torchs_mean_over_labeled_tokens_however_rows_are_cut(
    all_tokens, load, tokenizer
):
    rows = [row_of(tags.split()) for tags in ("O", "B-PER I-PER O", "O O", "I-PER O O B-PER")]
    train_rows = load(rows)[0]
    weights = torch.randn(tokenizer.vocab_size, 3, generator=torch.Generator().manual_seed(0))

    def model(input_ids, **_):
        return SimpleNamespace(logits=weights[input_ids])

    whole = collate(tokenizer, train_rows, [0, 1, 2, 3], all_tokens)
    expected = torch.nn.CrossEntropyLoss()(
        weights[whole["inputs"]["input_ids"]].flatten(0, 1), whole["labels"].flatten()
    )
    batches = [collate(tokenizer, train_rows, cut, all_tokens) for cut in ([0, 1], [], [2], [3])]
    total = sum(summed_tag_loss(model, batch)[0] for batch in batches)
    num_labeled = sum(batch["counts"][0] for batch in batches)
    assert num_labeled == whole["counts"][0] >= 10
    assert (total / num_labeled).item() == pytest.approx(expected.item(), rel=1e-6)
