# SPDX-License-Identifier: Apache-2.0
"""Pairs of texts become tokens, a loss and metrics.

Expected values are worked out by hand or by the libraries. In process, on tiny random models in
fp32.
"""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import sacrebleu
import torch
from datasets import Dataset
from rouge_score import rouge_scorer
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, BartConfig, M2M100Config

import t5

SOURCE, TARGET = "the dog sees a ship", "nuka zovo pizu"
NO_COLUMNS, NO_LANGUAGES = (None, None), (None, None)
SHAPE = {
    "vocab_size": 320,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "scale_embedding": True,
}
# What summed_target_loss asks of an Accelerator
ALONE = SimpleNamespace(unwrap_model=lambda model: model)


@pytest.fixture(scope="module")
def tokenizer(tiny_of):
    return AutoTokenizer.from_pretrained(tiny_of("t5") / "model")


@pytest.fixture(scope="module")
def tokenized(tiny_of, tokenizer):
    """The first ten test rows."""
    lines = (tiny_of("t5") / "data" / "test.jsonl").read_text().splitlines()[:10]
    rows = []
    for number, line in enumerate(lines, 1):
        pair = json.loads(line), tokenizer, NO_COLUMNS, NO_LANGUAGES, "", (64, 64)
        rows.append(t5.tokenize_pair(*pair) | {"row": number})
    return Dataset.from_list(rows).with_format("numpy")


def models(tiny):
    """Models with tied embeddings under three names, one with scales, one that moves labels itself.

    The last does so only in its forward pass.
    """
    torch.manual_seed(0)
    yield "T5", AutoModelForSeq2SeqLM.from_pretrained(tiny / "model").eval()
    for config in (BartConfig(**SHAPE), M2M100Config(**SHAPE)):
        yield type(config).__name__, AutoModelForSeq2SeqLM.from_config(config).eval()


@pytest.mark.parametrize(
    ("row", "columns", "languages"),
    [
        ({"source": SOURCE, "target": TARGET}, NO_COLUMNS, NO_LANGUAGES),
        ({"text": SOURCE, "summary": TARGET, "title": "a ship"}, NO_COLUMNS, NO_LANGUAGES),
        ({"text": SOURCE, "title": TARGET, "summary": "a ship"}, (None, "title"), NO_LANGUAGES),
        ({"report": SOURCE, "headline": TARGET}, ("report", "headline"), NO_LANGUAGES),
        ({"translation": {"en": SOURCE, "de": TARGET}}, NO_COLUMNS, ("en", "de")),
        ({"translation": {"de": TARGET, "en": SOURCE}}, NO_COLUMNS, ("en_XX", "de_DE")),
    ],
    ids=str,
)
def test_all_forms_of_rows_become_the_same_pair(row, columns, languages):
    assert t5.source_and_target(row, columns, languages) == [SOURCE, TARGET]


def test_the_loss_is_the_models_own_summed_over_the_rows_one_by_one(tiny_of, tokenized):
    for name, model in models(tiny_of("t5")):
        batch = t5.Seq2SeqCollator(0)(tokenized, [[number] for number in range(10)])
        loss = t5.summed_target_loss(ALONE, model, batch)
        alone = 0
        for row in tokenized.with_format(None):
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            alone += model(input_ids=ids, labels=labels).loss * labels.numel()
        assert loss.item() == pytest.approx(alone.item(), rel=1e-5), name
        assert batch["counts"][0] == sum(map(len, tokenized["labels"][:]))
        assert batch["counts"][1] == tokenized["length"][:].sum()
        assert batch["row"] == list(range(1, 11))


def test_metrics_are_those_of_the_libraries():
    texts = ["a red ship", "the dog", "every old king sleeps now"]
    targets = ["a red house", "the dog", "every king sleeps here now"]
    found = t5.text_metrics(texts, targets)
    assert found["eval_bleu"] == sacrebleu.metrics.BLEU().corpus_score(texts, [targets]).score
    for name in ("rouge1", "rouge2", "rougeL"):
        scorer = rouge_scorer.RougeScorer([name], use_stemmer=True)
        pairs = zip(targets, texts, strict=True)
        mean = np.mean([scorer.score(target, text)[name].fmeasure for target, text in pairs])
        assert found[f"eval_{name}"] == pytest.approx(100 * mean, rel=1e-12)
