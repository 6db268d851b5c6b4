# SPDX-License-Identifier: Apache-2.0
"""Calls that would fail, or would run and not do what they ask for, are refused before the start.

One table for each kind of cause: what is asked for, and a word that the refusal has to name. An
empty word stands for what looks alike and is taken.
"""

import importlib

import pytest
from accelerate.utils import LoggerType

from components.checks import find_missing_data
from components.hub_ids import find_missing
from core.cli import parse
from core.metrics import find_missing_tracker
from example_arguments import language_model_arguments


def arguments(recipe, words):
    """The arguments of a recipe that is called with these words."""
    return parse(importlib.import_module(recipe).Arguments, words=words.split())


def assert_names(problems, word):
    """Assert that one problem was found, which names a word; none, if the word is empty."""
    found = list(problems)
    assert len(found) == bool(word) and all(word in line for line in found), found


# ---- Folders and files ----
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
    [("none", ""), ("tensorboard", ""), ("all", ""), ("wandb", "wandb"), ("comet_ml", "comet_ml")],
)
def test_a_tracker_that_is_not_installed(name, word, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType.TENSORBOARD])
    assert_names(find_missing_tracker(language_model_arguments("--report_to", name)), word)
