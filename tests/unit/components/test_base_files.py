# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a base is that of its weights, wherever they are."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.base_files import fingerprint_of_weights


@pytest.fixture
def model(tiny, tmp_path):
    """A copy of a model, which a test may change."""
    return shutil.copytree(tiny / "model", tmp_path / "model")


def fingerprint(folder):
    return fingerprint_of_weights(str(folder), "main")


def test_a_copy_has_the_fingerprint_of_the_original(model, tiny):
    assert fingerprint(model) == fingerprint(tiny / "model")
    assert len(fingerprint(model)) == 64


def test_what_is_not_a_weight_does_not_count(model, tiny):
    (model / "config.json").write_text("{}")
    assert fingerprint(model) == fingerprint(tiny / "model")


def test_other_weights_of_the_same_shapes_have_another_one(model, tiny):
    path = model / "model.safetensors"
    tensors = load_file(path)
    for weight in tensors.values():
        weight += torch.randn_like(weight) * 1e-3
    save_file(tensors, path, {"format": "pt"})
    assert path.stat().st_size == (tiny / "model" / "model.safetensors").stat().st_size
    assert fingerprint(model) != fingerprint(tiny / "model")


def test_a_small_file_is_read_whole(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"12" + name.encode())
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_without_files_there_is_none(tmp_path):
    assert fingerprint(tmp_path) is None
    assert fingerprint("owner/model_that_was_never_downloaded") is None
