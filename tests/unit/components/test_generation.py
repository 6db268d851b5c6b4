# SPDX-License-Identifier: Apache-2.0
"""Generation while training leaves what training needs as it is."""

import contextlib
from types import SimpleNamespace

import torch

from components.generation import generate


class Compiled(torch.nn.Module):
    """A model with a compiled layer, which counts how often it is compiled."""

    def __init__(self):
        super().__init__()
        self.num_compiled = 0
        self.layer = torch.compile(torch.nn.ReLU(), backend=self.count, dynamic=False)

    def count(self, graph, _):
        self.num_compiled += 1
        return graph.forward

    def generate(self, input_ids, synced_gpus):
        for length in range(1, 4):
            self.layer(torch.ones(length))
        return input_ids


def test_compiled_layers_are_not_compiled_again_for_each_length():
    model = Compiled()
    accelerator = SimpleNamespace(
        num_processes=1,
        is_fsdp2=False,
        autocast=contextlib.nullcontext,
        unwrap_model=lambda model: model,
    )
    generate(accelerator, model, {"input_ids": torch.ones(1, 1)})
    assert model.num_compiled == 0
    model.generate(None, synced_gpus=False)  # Outside, each length is another graph.
    assert model.num_compiled > 1
