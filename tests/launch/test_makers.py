# SPDX-License-Identifier: Apache-2.0
"""scripts/make_tiny.py writes a model and rows for each recipe, the same ones for the same call."""

import hashlib
from pathlib import Path

import pytest

from jobs import RECIPES
from tiny import makers

FEW_ROWS = ["--num_train_rows", "20", "--num_test_rows", "8"]


def contents(folder: Path) -> dict[str, str]:
    """Return the hash of each file."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_same_call_writes_the_same_model_and_rows(recipe, tmp_path):
    for name in "ab":
        makers.make(recipe, tmp_path / name, FEW_ROWS)
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    assert "model/model.safetensors" in first


def test_a_tokenizer_is_trained_on_a_text(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": ["hello hello", {"b": "hello"}], "n": 3}\n\n"hello"\n')
    makers.make("llama", tmp_path, ["--text", str(rows), "--vocab_size", "270"])
    vocabulary = (tmp_path / "model" / "tokenizer.json").read_text()
    assert '"hello"' in vocabulary
    assert not (tmp_path / "data").exists()
