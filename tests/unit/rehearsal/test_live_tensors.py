# SPDX-License-Identifier: Apache-2.0
"""What a rank holds is counted once, whole or split, and at its first real step."""

import json

import pytest
import torch
from accelerate import Accelerator
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen3Config,
)

from rehearsal import step_hooks
from rehearsal.live_tensors import held, live_state, master_weights, measure_first_step
from rehearsal.step_hooks import describe


def tied_model():
    """Two layers of 4 x 3 that share their weight, and a frozen one."""
    first = torch.nn.Linear(3, 4, bias=False)
    second = torch.nn.Linear(3, 4)
    second.weight = first.weight
    frozen = torch.nn.Linear(5, 2, bias=False)
    frozen.requires_grad_(False)
    return torch.nn.ModuleList([first, second, frozen])


def test_tied_tensors_are_described_once():
    assert describe(tied_model()) == [
        (12, 4, True),
        (4, 4, True),
        (10, 2, False),
    ]


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


def test_optimizer_state_is_that_of_the_size_of_its_parameter():
    model = torch.nn.Linear(3, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state, per_parameter = live_state(optimizer)
    assert per_parameter == 2 and held(state)["elements"] == 2 * (12 + 4)
    assert master_weights(optimizer, model) == []
    assert held(master_weights(optimizer, torch.nn.Linear(3, 4)))["elements"] == 16


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


def test_steps_of_deepspeeds_engine_are_hooked_as_a_whole():
    class Engine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.optimizer = torch.nn.Module()
            self.optimizer.optimizer = "torch's"

        def zero_optimization_stage(self):
            return 2

        def step(self):
            seen.append("step")

    seen = []
    engine = Engine()

    def note(zero, base):
        seen.append((zero is engine.optimizer, base))

    step_hooks.around_steps(engine, optimizer=None, before=note, after=note)
    engine.step()
    assert seen == [(True, "torch's"), "step", (True, "torch's")]


def test_a_rank_is_promised_its_part_of_experts():
    config = MixtralConfig(
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=16,
    )
    model = AutoModelForCausalLM.from_config(config)
    names = [name for name, _ in model.named_parameters()]
    whole = dict(zip(names, describe(model), strict=True))
    spread = dict(zip(names, describe(model, expert_ranks=2), strict=True))
    experts = "model.layers.0.mlp.experts.gate_up_proj"
    assert (whole.pop(experts), spread.pop(experts)) == (
        (4 * 16 * 16, 4, True),
        (2 * 16 * 16, 2, True),
    )
    assert whole.pop(experts.replace("gate_up", "down")) != spread.pop(
        experts.replace("gate_up", "down")
    )
    assert whole == spread


@pytest.mark.parametrize("config", [LlamaConfig, Olmo2Config, Phi3Config, Qwen3Config])
def test_the_promise_knows_each_style_by_which_a_plan_splits_a_matrix(config):
    styles = {*config.base_model_tp_plan.values()}
    whole = {style for style in styles if style.startswith("replicated")}
    assert styles - whole <= step_hooks.SPLIT_DIMENSION.keys()
