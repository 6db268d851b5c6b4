# SPDX-License-Identifier: Apache-2.0
"""The Python of docs/use_your_model.md does what the page says."""

import re
import shutil

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from launching import REPO

PAGE = (REPO / "docs" / "use_your_model.md").read_text()


@pytest.fixture
def runs(tiny, tmp_path, monkeypatch):
    """Two finished runs as on the page: all weights in runs/full, adapters in runs/lora."""
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    shutil.copytree(tiny / "model", runs / "full")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    settings = LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")
    adapted = get_peft_model(model, settings)
    torch.manual_seed(0)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:  # zero in new adapters, which then change nothing
            torch.nn.init.normal_(weight, std=0.1)
    adapted.save_pretrained(runs / "lora")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(runs / "lora")
    return runs


def logits_of(model):
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


def test_models_and_adapters_load_as_the_page_says(runs):
    load, load_adapters = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {}
    exec(load, names)
    base = logits_of(names["model"])
    exec(load_adapters, names)
    assert not torch.allclose(logits_of(names["model"]), base, atol=0.01)
