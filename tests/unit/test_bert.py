# SPDX-License-Identifier: Apache-2.0
"""recipes/bert.py: texts and pairs of texts become tokens with a label."""

import pytest
from transformers import AutoTokenizer

import bert

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
