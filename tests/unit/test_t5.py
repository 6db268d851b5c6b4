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
from components.cli import parse_arguments
from components.rows import Rows
from fakes import fake_accelerator

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
LIMITS = ["--max_source_length", "64", "--max_target_length", "64"]
ALONE = SimpleNamespace(
    unwrap_model=lambda model: model
)  # what summed_target_loss asks of an Accelerator


@pytest.fixture(scope="module")
def tokenizer(tiny_of):
    return AutoTokenizer.from_pretrained(tiny_of("t5") / "model")


@pytest.fixture(scope="module")
def tokenized(tiny_of, tokenizer):
    """The first ten test rows."""
    lines = (tiny_of("t5") / "data" / "test.jsonl").read_text().splitlines()[:10]
    rows = [
        t5.tokenize_pair(json.loads(line), tokenizer, NO_COLUMNS, NO_LANGUAGES, "", (64, 64))
        for line in lines
    ]
    return Dataset.from_list([row | {"row": i} for i, row in enumerate(rows, 1)]).with_format(
        "numpy"
    )


def rows_of(tokenized):
    return Rows(tokenized, notes="", prefix="test.jsonl, line")


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


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"source": " ", "target": TARGET}, "has no source text in source:  "),
        ({"source": SOURCE, "target": ""}, "has no target text in target"),
        ({"source": SOURCE, "target": None}, "has no target text in target: None"),
        ({"source": SOURCE, "target": 5}, "has no target text in target: 5"),
        ({"text": SOURCE, "title": TARGET}, "has the columns text, title; needs source and target"),
        (
            {"translation": {"en": SOURCE, "de": TARGET}},
            "has the columns translation; needs source and target",
        ),
        ({}, "has the columns none"),
        ({"source": SOURCE, "target": "\ud800"}, "surrogates not allowed"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_used_says_why(row, says, tokenizer):
    with pytest.raises(ValueError) as error:
        t5.tokenize_pair(row, tokenizer, NO_COLUMNS, NO_LANGUAGES, "", (64, 64))
    assert says in str(error.value)


def test_without_a_known_pair_the_last_one_is_named(monkeypatch):
    monkeypatch.setattr(t5, "SOURCE_AND_TARGET", {"question": "answer", "verse": "prose"})
    with pytest.raises(ValueError, match="has the columns body; needs verse and prose"):
        t5.source_and_target({"body": SOURCE}, NO_COLUMNS, NO_LANGUAGES)


def test_the_languages_are_given_both_or_not_at_all():
    def conflicts(*words):
        args = parse_arguments(t5.Arguments, words=[*words])
        return list(args.find_own_conflicts())

    both = ["--source_lang", "en", "--target_lang", "de"]
    assert conflicts() == conflicts(*both) == []
    for one in (both[:2], both[2:]):
        assert conflicts(*one) == ["--source_lang and --target_lang: give both or neither"]


class TestTokens:
    def test_both_texts_end_with_eos_and_the_prefix_comes_first(self, tokenizer):
        pair = {"source": SOURCE, "target": TARGET}
        row = t5.tokenize_pair(pair, tokenizer, NO_COLUMNS, NO_LANGUAGES, "say: ", (64, 64))
        assert tokenizer.decode(row["input_ids"]) == f"say: {SOURCE}</s>"
        assert tokenizer.decode(row["labels"]) == f"{TARGET}</s>" and row["target"] == TARGET
        assert not row["truncated"] and row["length"] == len(row["input_ids"]) + len(row["labels"])
        assert row["longest"] == len(row["input_ids"]) and row["largest"] == max(
            row["input_ids"] + row["labels"]
        )

    def test_long_texts_lose_their_end_but_not_eos_nor_the_reference(self, tokenizer):
        pair = {"source": SOURCE, "target": TARGET}
        whole = t5.tokenize_pair(pair, tokenizer, NO_COLUMNS, NO_LANGUAGES, "", (6, 4))
        assert not whole["truncated"] and (len(whole["input_ids"]), len(whole["labels"])) == (6, 4)
        for limits in ((5, 4), (6, 3)):
            row = t5.tokenize_pair(pair, tokenizer, NO_COLUMNS, NO_LANGUAGES, "", limits)
            assert row["truncated"] and (len(row["input_ids"]), len(row["labels"])) == limits
            assert (
                row["input_ids"][-1] == row["labels"][-1] == tokenizer.eos_token_id
                and row["target"] == TARGET
            )
            assert (
                row["input_ids"][:4] == whole["input_ids"][:4]
                and row["labels"][:2] == whole["labels"][:2]
            )

    def test_eos_is_put_where_the_tokenizer_puts_none(self, tiny_of):
        bare = AutoTokenizer.from_pretrained(tiny_of("t5") / "model")
        bare._tokenizer.post_processor = None
        assert t5.cut_tokens(bare, 64, text=SOURCE)[0][-1] == bare.eos_token_id
        tokens, truncated = t5.cut_tokens(bare, 3, text=SOURCE)
        assert truncated and len(tokens) == 3 and tokens[-1] == bare.eos_token_id

    def test_the_hash_knows_where_the_source_ends(self, tokenizer):
        pairs = [{"source": "dog dog", "target": "ship"}, {"source": "dog", "target": "dog ship"}]
        hashes = {
            t5.tokenize_pair(pair, tokenizer, NO_COLUMNS, NO_LANGUAGES, "", (64, 64))["hash"]
            for pair in pairs
        }
        assert len(hashes) == 2


class TestLoss:
    def test_it_is_the_models_own_summed_over_the_rows_one_by_one(self, tiny_of, tokenized):
        for name, model in models(tiny_of("t5")):
            batch = t5.Seq2SeqCollator(0)(tokenized, [[number] for number in range(10)])
            loss, alone = t5.summed_target_loss(ALONE, model, batch), 0
            for row in tokenized.with_format(None):
                labels = torch.tensor([row["labels"]])
                alone += (
                    model(input_ids=torch.tensor([row["input_ids"]]), labels=labels).loss
                    * labels.numel()
                )
            torch.testing.assert_close(
                loss, alone, rtol=1e-5, atol=0, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert batch["counts"][0] == sum(map(len, tokenized["labels"][:])) and batch[
                "row"
            ] == list(range(1, 11))
            assert batch["counts"][1] == tokenized["length"][:].sum()

    def test_a_rank_without_rows_adds_nothing_and_takes_part_in_every_layer(
        self, tiny_of, tokenized
    ):
        for name, model in models(tiny_of("t5")):
            batch = t5.Seq2SeqCollator(0)(tokenized, [])
            loss = t5.summed_target_loss(ALONE, model, batch)
            loss.backward()
            gradients = [weight.grad for weight in model.parameters()]
            assert loss == 0 and batch["counts"].tolist() == [0, 0] and batch["row"] == [], name
            assert all(gradient is not None and not gradient.any() for gradient in gradients), name


def test_one_module_holds_the_embedding_and_the_model_computes_and_saves_the_same(
    tiny_of, tokenized, tmp_path
):
    batch = t5.Seq2SeqCollator(0)(tokenized, [[0], [1]])
    for name, model in models(tiny_of("t5")):
        model.save_pretrained(tmp_path / name)
        words = ["--model_name_or_path", str(tmp_path / name), "--forced_bos_token", "dog"]
        args = parse_arguments(t5.Arguments, words=[*words, *LIMITS])
        loaded = t5.load_model(
            args, fake_accelerator(), SimpleNamespace(get_vocab=lambda: {"dog": 7})
        )
        weight = loaded.get_input_embeddings().weight
        embeddings = [
            module for module in loaded.modules() if getattr(module, "weight", None) is weight
        ]
        assert len(embeddings) == 2 and embeddings[1] is loaded.get_output_embeddings(), name
        losses = [t5.summed_target_loss(ALONE, each, batch) for each in (loaded.eval(), model)]
        torch.testing.assert_close(*losses)
        assert loaded.state_dict().keys() == model.state_dict().keys()
        assert loaded.generation_config.forced_bos_token_id == 7
        assert not any(getattr(module, "layerdrop", 0) for module in loaded.modules())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--max_source_length", "65"], "has 64 positions: use 64 or less"),
        (["--generation_max_length", "65"], "has 64 positions: use 64 or less"),
        (["--forced_bos_token", "dgo"], "--forced_bos_token dgo: no such token"),
    ],
    ids=" ".join,
)
def test_what_the_model_or_tokenizer_has_not_is_refused(change, says, tmp_path, capsys):
    AutoModelForSeq2SeqLM.from_config(BartConfig(**SHAPE)).save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path), *LIMITS, *change]
    args = parse_arguments(t5.Arguments, words=words)
    with pytest.raises(SystemExit, match="64"):
        tokenizer = SimpleNamespace(get_vocab=lambda: {"dog": 7})
        t5.load_model(args, fake_accelerator(), tokenizer)
    assert says in capsys.readouterr().err


class TestMetrics:
    TEXTS = ["a red ship", "the dog", "every old king sleeps now"]
    TARGETS = ["a red house", "the dog", "every king sleeps here now"]

    def test_they_are_those_by_hand(self):
        found = t5.text_metrics(self.TEXTS, self.TARGETS)
        # Both texts of a pair have as many words: F-measure = precision = recall. Words in common:
        # 2 of 3, 2 of 2 and 4 of 5; neighbors: "a red" of 2, "the dog" of 1, "king sleeps" of 4; in
        # the same order: all words in common
        assert found["eval_rouge1"] == pytest.approx(100 * (2 / 3 + 1 + 4 / 5) / 3)
        assert found["eval_rouge2"] == pytest.approx(100 * (1 / 2 + 1 + 1 / 4) / 3)
        assert found["eval_rougeL"] == pytest.approx(100 * (2 / 3 + 1 + 4 / 5) / 3)
        assert found["eval_exact_match"] == pytest.approx(100 / 3)

    def test_they_are_those_of_the_libraries(self):
        found = t5.text_metrics(self.TEXTS, self.TARGETS)
        assert (
            found["eval_bleu"]
            == sacrebleu.metrics.BLEU().corpus_score(self.TEXTS, [self.TARGETS]).score
        )
        for name in ("rouge1", "rouge2", "rougeL"):
            scorer = rouge_scorer.RougeScorer([name], use_stemmer=True)
            pairs = zip(self.TARGETS, self.TEXTS, strict=True)
            mean = np.mean([scorer.score(target, text)[name].fmeasure for target, text in pairs])
            assert found[f"eval_{name}"] == pytest.approx(100 * mean, rel=1e-12)

    def test_they_span_nothing_right_to_all_right(self):
        assert set(t5.text_metrics(["x y z w v"], ["a b c d e"]).values()) == {0.0}
        assert list(t5.text_metrics(["a b c d e"], ["a b c d e"]).values()) == pytest.approx(
            [100] * 5
        )

    def test_predictions_stand_beside_their_targets(self, tokenized, tokenizer, tmp_path):
        written = [(row, f" größer {row}") for row in range(1, 11)]
        metrics = t5.keep_predictions(written, rows_of(tokenized), tokenizer, tmp_path)
        text = (tmp_path / "predictions.jsonl").read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        assert [line["row"] for line in lines] == list(range(1, 11)) and metrics[
            "eval_exact_match"
        ] == 0
        assert [line["target"] for line in lines] == tokenized["target"][:].tolist()
        assert lines[4]["prediction"] == "größer 5" and "größer 5" in text
        assert lines[4]["source"] + "</s>" == tokenizer.decode(tokenized[4]["input_ids"])

    def test_a_lost_row_is_no_silent_loss(self, tokenized, tokenizer, tmp_path):
        with pytest.raises(ValueError):
            t5.keep_predictions(
                [(row, "text") for row in range(1, 10)], rows_of(tokenized), tokenizer, tmp_path
            )
