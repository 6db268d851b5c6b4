# SPDX-License-Identifier: Apache-2.0
"""A gathered training state is on the host and comes back in place."""

from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.nn import Linear8bitLt
from bitsandbytes.optim import AdamW8bit

from components.deepspeed_state import master_weights
from components.saved_state import SavedState
from components.state import (
    first_nonfinite,
    gather_state,
    get_loss_scale,
    restore_loss_scale,
    restore_state,
)
from fakes import fake_accelerator


def trained(optimizer_class, seed):
    """A model after a step, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 2))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    for weight in model.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def gathered(model, optimizer):
    return gather_state(fake_accelerator(), model, SimpleNamespace(optimizer=optimizer))


def restored(model, optimizer, state):
    accelerator = fake_accelerator()
    saved = SavedState(accelerator, state)
    return restore_state(accelerator, model, SimpleNamespace(optimizer=optimizer), saved)


def assert_equal(state, other):
    assert state.keys() == other.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, other[name]), name


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, AdamW8bit])
def test_a_state_comes_back_into_the_tensors_that_are_there(optimizer_class):
    state = gathered(*trained(optimizer_class, seed=1))
    model, optimizer = trained(optimizer_class, seed=2)
    held = list(model.parameters())
    for entries in optimizer.state.values():
        held += [value for value in entries.values() if torch.is_tensor(value)]
    places = [tensor.data_ptr() for tensor in held]
    assert restored(model, optimizer, state)
    assert [tensor.data_ptr() for tensor in held] == places
    assert_equal(gathered(model, optimizer), state)


@pytest.mark.parametrize(
    "change", [lambda s: s.pop("state.0.weight.exp_avg"), lambda s: s.update(other=s["0.bias"])]
)
def test_a_state_of_another_model_is_not_taken(change):
    state = gathered(*trained(torch.optim.AdamW, seed=1))
    change(state)
    assert not restored(*trained(torch.optim.AdamW, seed=2), state)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_found(number):
    tensor = torch.ones(1000)
    tensor[500] = number
    assert (
        first_nonfinite({"good": torch.ones(3), "steps": torch.tensor(3), "bad": tensor}) == "bad"
    )


def test_finite_numbers_whose_sum_is_not_are_finite():
    assert first_nonfinite({"large": torch.full((4,), 3e38)}) is None


def with_norm(seed):
    """A model with BatchNorm after a step, and its optimizer."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(16, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def test_running_statistics_are_saved_and_come_back():
    """Training also changes them: if they were not restored, BatchNorm would start over."""
    state = gathered(*with_norm(1))
    model, optimizer = with_norm(2)
    assert restored(model, optimizer, state)
    assert torch.equal(model[1].running_mean, state["buffer.1.running_mean"])
    del state["buffer.1.running_var"]
    assert not restored(model, optimizer, state)


def test_adapters_of_an_int8_base_are_saved_and_come_back():
    """Its state_dict has entries that are no attributes, at which torch's get_state_dict fails."""

    def with_int8_base(seed):
        torch.manual_seed(seed)
        base = Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu").requires_grad_(False)
        model = torch.nn.Sequential(base, torch.nn.Linear(64, 2))
        optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-3)
        model(torch.randn(4, 64)).sum().backward()
        optimizer.step()
        return model, optimizer

    state = gathered(*with_int8_base(seed=1))
    weights = {name for name in state if not name.startswith("state.")}
    assert weights == {"1.weight", "1.bias"} and "state.1.weight.exp_avg" in state
    model, optimizer = with_int8_base(seed=2)
    assert restored(model, optimizer, state)
    assert torch.equal(model[1].weight, state["1.weight"])


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, AdamW8bit])
def test_a_state_comes_back_into_an_optimizer_that_has_not_stepped(optimizer_class):
    """As in each run that resumes. The step that makes its state must not change the weights."""
    state = gathered(*trained(optimizer_class, seed=1))
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 2))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    assert restored(model, optimizer, state)
    assert_equal(gathered(model, optimizer), state)


# ---- ZeRO-0 in bf16 ----
class Zero0:
    """DeepSpeed's optimizer of ZeRO-0 in bf16: fp32 master weights, and AdamW over them."""

    def __init__(self, model):
        low = list(model.parameters())
        masters = [weight.detach().float().requires_grad_() for weight in low]
        self.fp16_groups = [low]
        self.fp32_groups = [masters]
        self.optimizer = torch.optim.AdamW(masters, lr=1e-3)

    def step(self):
        (masters,) = self.fp32_groups
        for master in masters:
            master.grad = torch.randn_like(master)
        self.optimizer.step()
        for weight, master in zip(*self.fp16_groups, masters, strict=True):
            weight.data.copy_(master)


def zero0(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 2)).bfloat16()
    optimizer = Zero0(model)
    optimizer.step()
    return model, optimizer


def test_master_weights_are_saved_in_fp32_and_come_back_with_their_16_bit_copies():
    state = gathered(*zero0(seed=1))
    assert state["0.weight"].dtype == torch.float32
    model, optimizer = zero0(seed=2)
    assert restored(model, optimizer, state)
    assert_equal(gathered(model, optimizer), state)
    for weight, master in master_weights(model, optimizer).values():
        assert weight.dtype == torch.bfloat16 and weight.equal(master.bfloat16())


# ---- fp16's loss scale ----
def scaled_by(scaler=None, zero=None, precision="fp16"):
    """An accelerator and an optimizer of fp16, whose loss accelerate or DeepSpeed scales."""
    accelerator = fake_accelerator(mixed_precision=precision, scaler=scaler)
    return accelerator, SimpleNamespace(optimizer=zero)


def test_the_loss_scale_of_accelerates_scaler_comes_back():
    scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0)]
    saved = get_loss_scale(*scaled_by(scalers[0]))
    assert saved["scale"] == 8.0
    restore_loss_scale(*scaled_by(scalers[1]), saved)
    assert get_loss_scale(*scaled_by(scalers[1])) == saved


@pytest.mark.parametrize("attribute", ["loss_scaler", "loss_scale_config"])
def test_the_loss_scale_of_deepspeed_comes_back(attribute):
    """ZeRO-1 to 3 have a scaler, ZeRO-0 has a config; neither has a function for its state."""
    scaler = SimpleNamespace(cur_scale=2.0, cur_iter=1, last_overflow_iter=0, scale_window=1000)
    accelerator, optimizer = scaled_by(zero=SimpleNamespace(**{attribute: scaler}))
    assert get_loss_scale(accelerator, optimizer) == {
        "cur_scale": 2.0,
        "cur_iter": 1,
        "last_overflow_iter": 0,
    }
    restore_loss_scale(accelerator, optimizer, {"cur_scale": 8.0, "cur_iter": 5, "other": 3})
    assert (scaler.cur_scale, scaler.cur_iter) == (8.0, 5) and not hasattr(scaler, "other")
