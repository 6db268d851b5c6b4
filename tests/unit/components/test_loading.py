# SPDX-License-Identifier: Apache-2.0
"""A model that cannot be read is refused in one line with a fix; a dry run reads no weights."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    LlamaConfig,
    T5Config,
    ViTConfig,
)

from components.chat import load_tokenizer
from components.loading import build_without_weights, kind_of_config, loading

TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
CONFIGS = {
    AutoModelForCausalLM: LlamaConfig(**TINY, vocab_size=16),
    AutoModelForSeq2SeqLM: T5Config(d_model=8, d_kv=8, d_ff=8, num_layers=1, num_heads=1),
    AutoModelForSequenceClassification: BertConfig(**TINY, vocab_size=16),
    AutoModelForImageClassification: ViTConfig(**TINY, image_size=32),
}


def told(what, name, error, capsys):
    """The exit code and the lines when an error is raised where something is read."""
    with pytest.raises(SystemExit) as ended, loading(what, str(name)):
        raise error
    return ended.value.code, capsys.readouterr().err.splitlines()


class TestTokenizer:
    @pytest.fixture
    def folder(self, tmp_path):
        LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
        return tmp_path

    def test_a_folder_without_one_is_told_what_it_needs(self, folder, capsys):
        with pytest.raises(SystemExit, match="64"):
            load_tokenizer(str(folder))
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{folder}: no tokenizer in this folder: copy tokenizer.json" in line

    def test_one_that_is_damaged_is_not_called_missing(self, folder, capsys):
        (folder / "tokenizer.json").write_text("{")
        with pytest.raises(SystemExit, match="64"):
            load_tokenizer(str(folder))
        told = capsys.readouterr().err
        assert "no tokenizer: " in told and "in this folder" not in told

    def test_one_of_a_hub_that_is_not_there_says_how_to_do_without(self, capsys):
        with pytest.raises(SystemExit, match="69"):
            load_tokenizer("nobody/nothing")
        first, second = capsys.readouterr().err.splitlines()
        assert first.startswith("error: nobody/nothing: no such folder here, and no tokenizer from")
        assert second.startswith("error: Offline: python scripts/make_tiny.py")


def test_what_is_read_is_not_touched():
    with loading("model", "somewhere"):
        found = 1
    assert found == 1


@pytest.mark.parametrize(
    ("what", "name", "error", "code"),
    [
        ("image processor", "nobody/nothing", OSError("no such"), 69),
        ("image processor", "nobody/nothing", KeyError("size"), 64),  # it was reached
        ("image processor", "./nothing", OSError("no such"), 64),
        ("model", "nobody/nothing", OSError("no such"), 64),  # its tokenizer was there
        ("model", "./nothing", RuntimeError("a reader\nof weights"), 64),
    ],
)
def test_only_a_hub_that_cannot_be_reached_has_its_own_code(what, name, error, code, capsys):
    ended, lines = told(what, name, error, capsys)
    assert ended == code and len(lines) == 1 + (code == 69)
    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text}"
    problem = f"no {what}: {reason}"
    if code == 69:
        problem = f"no such folder here, and no {what} from the hub: {reason}"
    assert lines[0] == f"error: {name}: {problem}"


def test_no_advice_is_chosen_by_the_words_of_an_exception(capsys):
    error = RuntimeError("size mismatch; use ignore_mismatched_sizes=True")
    code, lines = told("model", "somewhere", error, capsys)
    assert code == 64 and lines == [f"error: somewhere: no model: RuntimeError: {error}"]


@pytest.mark.parametrize("auto_class", CONFIGS, ids=lambda kind: kind.__name__)
def test_a_dry_run_has_the_shapes_of_the_model_and_reads_no_weights(auto_class, tmp_path):
    CONFIGS[auto_class].save_pretrained(tmp_path)  # and no weights
    options = {"dtype": "bfloat16", "attn_implementation": "eager", "trust_remote_code": False}
    model, _ = build_without_weights(
        auto_class, str(tmp_path), **options, device_map={"": 0}, quantization_config=object()
    )
    whole = auto_class.from_config(CONFIGS[auto_class])
    shapes = [{key: weight.shape for key, weight in m.named_parameters()} for m in (model, whole)]
    assert shapes[0] == shapes[1] and model.config._attn_implementation == "eager"
    for weight in model.parameters():
        assert weight.is_meta and weight.dtype == torch.bfloat16


def test_a_dry_run_has_the_head_of_the_classes_and_a_report(tmp_path):
    CONFIGS[AutoModelForSequenceClassification].save_pretrained(tmp_path)
    model, report = build_without_weights(
        AutoModelForSequenceClassification,
        str(tmp_path),
        dtype="float32",
        attn_implementation="sdpa",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        id2label={0: "a", 1: "b", 2: "c"},
        label2id={"a": 0, "b": 1, "c": 2},
    )
    assert model.classifier.out_features == 3
    assert report == {"missing_keys": [], "mismatched_keys": []}


@pytest.mark.parametrize(
    ("auto_class", "config", "says"),
    [
        (
            AutoModelForSeq2SeqLM,
            CONFIGS[AutoModelForCausalLM],
            "llama does not fit this recipe: recipes/ll",
        ),
        (
            AutoModelForCausalLM,
            CONFIGS[AutoModelForSeq2SeqLM],
            "t5 does not fit this recipe: recipes/t5.py",
        ),
        (
            AutoModelForImageClassification,
            CONFIGS[AutoModelForSequenceClassification],
            "bert does not fit this recipe: recipes/bert.py and recipes/bert_ner.py train encoders",
        ),
    ],
    ids=["Llama", "T5", "BERT"],
)
def test_a_model_of_another_kind_is_told_with_its_recipe(
    auto_class, config, says, tmp_path, capsys
):
    config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit, match="64"), loading("model", str(tmp_path)):
        build_without_weights(auto_class, tmp_path, dtype="float32", attn_implementation=None)
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path}: a model of type {says}" in line


def test_a_config_class_that_is_not_of_transformers_is_named_itself():
    assert kind_of_config("MyOwnConfig") == "MyOwnConfig"
