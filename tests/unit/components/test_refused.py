# SPDX-License-Identifier: Apache-2.0
"""Calls that would fail, or would run and not do what they ask for, are refused before the start.

One table for each kind of cause: what is asked for, and a word that the refusal has to name. An
empty word stands for what looks alike and is taken.
"""

import importlib
import json

import pytest
from accelerate.utils import LoggerType
from transformers import LlamaConfig

from components.checks import find_missing_data, find_model_problems
from components.hub_ids import find_missing
from components.model_folder import find_missing_weights
from components.trackers import find_missing_tracker
from core.cli import parse
from example_arguments import language_model_arguments


def arguments(recipe, words):
    """The arguments of a recipe that is called with these words."""
    return parse(importlib.import_module(recipe).Arguments, words=words.split())


def assert_names(problems, word):
    """Assert that one problem was found, which names a word; none, if the word is empty."""
    found = list(problems)
    assert len(found) == bool(word) and all(word in line for line in found), found


# ---- Folders and files ----
def test_what_is_no_model_of_the_recipes_kind(tmp_path):
    """The folder is empty, has an adapter alone, or a model of another kind."""

    def problems(recipe="llama"):
        return find_model_problems(arguments(recipe, f"--model_name_or_path {tmp_path}"))

    assert_names(problems(), "config.json")
    adapter = json.dumps({"base_model_name_or_path": "owner/base"})
    (tmp_path / "adapter_config.json").write_text(adapter)
    (tmp_path / "adapter_model.safetensors").touch()
    assert_names(problems(), "owner/base")
    (tmp_path / "adapter_config.json").unlink()
    for kind, recipe, word in (
        ("bert", "llama", "recipes/bert.py"),
        ("modernbert", "mistral_pretrain", "recipes/bert.py"),
        ("t5", "mixtral", "recipes/t5.py"),
        ("vit", "llama_dpo", "recipes/vit.py"),
        ("bart", "llama", ""),  # transformers takes its decoder
        ("newer", "llama", ""),
        ("bert", "bert", ""),
    ):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert_names(problems(recipe), word)


def test_a_model_without_weights_can_only_be_planned(tmp_path):
    LlamaConfig().save_pretrained(tmp_path)
    words = ["--model_name_or_path", str(tmp_path)]
    assert_names(find_missing_weights(language_model_arguments(*words)), "no weights")
    assert_names(find_missing_weights(language_model_arguments(*words, "--dry_run")), "")
    (tmp_path / "pytorch_model-00001-of-00002.bin").touch()
    assert_names(find_missing_weights(language_model_arguments(*words)), "")


def test_a_path_that_is_not_there_is_not_asked_of_the_hub(tmp_path, monkeypatch):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "rows.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("components.hub_ids.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    for name in ("gpt2", "owner/model", "mine", "mine/model"):
        assert find_missing(name) is None
    for name in ("runs/run", "./run", "/none/run", "~/none/run", "a/b/run", "mine/modle"):
        assert "no such folder" in find_missing(name)
    (tmp_path / "cache" / "models--mine--modle" / "snapshots").mkdir(parents=True)
    assert find_missing("mine/modle") is None  # the hub gave it before
    for name, word in (
        ("rows.jsonl", ""),
        ("owner/rows", ""),
        ("rwos.jsonl", "no such file"),
        ("data/rwos.parquet", "no such file"),
        ("./rwos", "no such file"),
    ):
        assert_names(find_missing_data(language_model_arguments("--dataset_name", name)), word)


@pytest.mark.parametrize(
    ("name", "word"),
    [("none", ""), ("tensorboard", ""), ("all", ""), ("wandb", "wandb"), ("comet_ml", "comet-ml")],
)
def test_a_tracker_that_is_not_installed(name, word, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    assert_names(find_missing_tracker(language_model_arguments("--report_to", name)), word)
