# SPDX-License-Identifier: Apache-2.0
"""A rank notes its tokens and weights once training has begun, and its weights once."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import Linear, Module

from pictures.parts import read_lines
from proof.part_probe import Parts

IDS = torch.tensor([[5, 6]])


class Layer(Module):
    def __init__(self):
        super().__init__()
        self.up_proj = Linear(2, 3, bias=False)
        self.down_proj = Linear(3, 2, bias=False)
        self.other = Linear(2, 2)


@pytest.fixture
def layer():
    return Layer()


@pytest.fixture
def parts(tmp_path):
    return Parts(tmp_path / "parts.0")


def test_nothing_is_noted_before_training(parts, layer):
    parts.note_inputs(layer, {"input_ids": IDS})
    parts.note_use(layer.up_proj)
    parts.save()
    assert parts.path.read_text() == ""
    assert not parts.weights and not parts.is_saved


def test_tokens_and_weights_are_what_the_rank_has(parts, layer):
    parts.has_begun = True
    parts.note_inputs(layer, {"input_ids": IDS, "position_ids": IDS + 1})
    for module in (layer.up_proj, layer.other):
        parts.note_use(module)
    parts.save()
    assert read_lines(parts.path) == [{"ids": [[5, 6]], "positions": [[6, 7]]}]
    saved = load_file(f"{parts.path}.safetensors")
    assert saved.keys() == {"held.up_proj", "held.down_proj", "used.up_proj"}
    assert saved["used.up_proj"].shape == (3, 2)


def test_what_zero_keeps_is_held_and_the_gathered_weight_is_used(parts, layer):
    layer.up_proj.weight.ds_tensor = torch.arange(3.0)
    parts.has_begun = True
    parts.note_inputs(layer, {"inputs_embeds": torch.ones(1, 2, 2)})
    parts.note_use(layer.up_proj)
    parts.save()
    parts.note_use(layer.down_proj)  # After the first pass nothing more is kept.
    assert parts.weights["held.up_proj"].tolist() == [0, 1, 2]
    assert parts.weights["used.up_proj"].shape == (3, 2)
    assert "used.down_proj" not in parts.weights
