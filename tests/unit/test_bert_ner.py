# SPDX-License-Identifier: Apache-2.0
"""Words become tokens that carry their tags, and a row that does not fit is named; the loss is that
of all labeled tokens, however rows are cut into batches (recipes/bert_ner.py).

In process. Expected values are worked out by hand, or by torch's own loss. The metrics:
tasks/test_entities.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import bert_ner
from core.cli import parse
from launching import write_rows
from tasks.tags import NO_WORD, label_tokens, summed_tag_loss, tag_words

NAMES = ["O", "B-PER", "I-PER"]
NUMBER_OF = {name: number for number, name in enumerate(NAMES)}


@pytest.fixture
def tokenizer(tiny_of):
    return AutoTokenizer.from_pretrained(tiny_of("bert_ner") / "model")


@pytest.fixture
def load(tiny_of, tokenizer, tmp_path):
    """A function from rows to those that `load_data` makes of them."""

    def load(rows):
        path = write_rows(tmp_path / "train.jsonl", rows)
        words = ["--model_name_or_path", str(tiny_of("bert_ner") / "model")]
        words += ["--dataset_name", str(path), "--output_dir", str(tmp_path / "run")]
        return bert_ner.load_data(parse(bert_ner.Arguments, words=words), tokenizer)[0]

    return load


def row_of(tags):
    return {"tokens": [f"word{place}" for place in range(len(tags))], "ner_tags": tags}


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
    train_rows = load(rows)
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
