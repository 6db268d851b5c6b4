# SPDX-License-Identifier: Apache-2.0
"""The families are transformers' own, and their tiny models are what they are said to be."""

import pytest
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from families.catalog import CATALOG, FAMILIES, NUM_ROWS, SHARED
from families.models import make_config
from families.own_loss import conversation_of
from tiny import skills, tokenizers

DROPOUT = ("drop", "noise")  # in the names of settings that make a loss random
# They act on classifiers only
HARMLESS = {"classifier_dropout", "summary_first_dropout"}
# Gemma 4's configuration takes it as an argument, and keeps it as the head_dim of some layers
ARGUMENTS = {"global_head_dim"}


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizers.byte_level_bpe([], 320, SHARED["max_position_embeddings"])


def test_each_is_a_causal_language_model_of_transformers():
    assert FAMILIES.keys() <= MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    assert len(FAMILIES) >= 40


@pytest.mark.parametrize("family", FAMILIES)
def test_each_setting_is_one_that_its_configuration_has(family):
    config = AutoConfig.for_model(family)
    known = {*config.to_dict(), *config.attribute_map, *ARGUMENTS}
    assert [name for name in FAMILIES[family] if name not in known] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_its_loss_is_not_random(family, tokenizer):
    settings = make_config(family, tokenizer).to_dict()
    random = {
        name: value
        for name, value in settings.items()
        if any(part in name for part in DROPOUT) and name not in HARMLESS and value
    }
    assert random == {}


def test_the_rows_are_longer_than_the_windows(tokenizer):
    rows = skills.make_rows(NUM_ROWS, 0, 0)["train"]
    texts = [tokenizer.apply_chat_template(conversation_of(row))["input_ids"] for row in rows]
    lengths = [len(text) for text in texts]
    window = CATALOG["parts"]["window"]["sliding_window"]
    assert window < min(lengths) and max(lengths) < SHARED["max_position_embeddings"]
