# SPDX-License-Identifier: Apache-2.0
"""What a rank holds is counted once, whole or split, and at its first real step."""

import json

import torch
from accelerate import Accelerator

from rehearsal.live_tensors import held, measure_first_step


def test_storage_that_several_tensors_share_is_counted_once():
    whole = torch.zeros(6, 2)
    other = torch.zeros(3, dtype=torch.bfloat16)
    found = held([whole, whole[2:], whole.view(12), other, torch.zeros(0)])
    assert found == {
        "elements": 15,
        "bytes": 54,
        "dtypes": ["bfloat16", "float32"],
        "devices": ["cpu"],
    }


def test_the_first_step_that_is_taken_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(Accelerator, "prepare", lambda self, *prepared: prepared)
    measure_first_step(tmp_path / "shards.0")
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    reference = torch.nn.Linear(7, 7).requires_grad_(False)
    accelerator = Accelerator.__new__(Accelerator)
    accelerator.prepare(reference)  # not trained, so it is not the model
    accelerator.prepare(model, optimizer)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        found = json.loads((tmp_path / "shards.0").read_text())
        assert found["gradients"]["elements"] == found["parameters"]["elements"] == 16
        assert found["optimizer"]["elements"] == 32 and found["master"]["elements"] == 0
        assert found["tensors"] == [[12, 4, True], [4, 4, True]]
        optimizer.param_groups[0]["params"].pop()  # what comes later is not measured
