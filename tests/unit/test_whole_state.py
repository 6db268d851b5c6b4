"""A gathered training state is on the host, comes back in place, and a number in it that is not finite is found."""

from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.nn import Linear8bitLt
from bitsandbytes.optim import AdamW8bit
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fakes import fake_accelerator
from whole_state import first_nonfinite, flatten, gather_state, restore_state


class OnGpu(torch.Tensor):
    """A tensor that says that it is on a GPU until it is moved to the host."""

    @property
    def device(self):
        return torch.device("cuda")

    def cpu(self):
        return self.as_subclass(torch.Tensor)


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
    return restore_state(fake_accelerator(), model, SimpleNamespace(optimizer=optimizer), state)


def test_optimizer_state_is_moved_to_the_host():
    """DeepSpeed's ZeRO-0 in bf16 keeps it on the GPU, where it cannot be compared with a checkpoint's."""
    found = flatten("state", {"weight": {"exp_avg": torch.zeros(2).as_subclass(OnGpu), "step": 3}})
    assert [tensor.device.type for tensor in found.values()] == ["cpu", "cpu"]


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, AdamW8bit])
def test_a_state_comes_back_into_the_tensors_that_are_there(optimizer_class):
    state = gathered(*trained(optimizer_class, seed=1))
    model, optimizer = trained(optimizer_class, seed=2)
    held = [
        *model.parameters(),
        *(v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)),
    ]
    places = [tensor.data_ptr() for tensor in held]
    assert restored(model, optimizer, state)
    assert [tensor.data_ptr() for tensor in held] == places
    again = gathered(model, optimizer)
    assert again.keys() == state.keys() and all(
        torch.equal(again[name], state[name]) for name in state
    )


def test_paged_optimizer_state_stays_paged():
    """bitsandbytes marks tensors in managed memory with an attribute that a copy does not have."""
    state = gathered(*trained(AdamW8bit, seed=1))
    model, optimizer = trained(AdamW8bit, seed=2)
    paged = optimizer.state[model[0].weight]["state1"]
    paged.is_paged = True
    assert restored(model, optimizer, state)
    assert optimizer.state[model[0].weight]["state1"].is_paged


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


def test_each_number_is_looked_at_only_where_the_sum_is_not_finite(monkeypatch):
    """torch.isfinite makes a tensor of flags: 0.57 GB/s on one thread, where a sum runs at 18."""
    looked_at, isfinite = [], torch.Tensor.isfinite
    monkeypatch.setattr(
        torch.Tensor, "isfinite", lambda self: looked_at.append(self.numel()) or isfinite(self)
    )
    assert first_nonfinite({"weights": torch.ones(1000)}) is None
    assert max(looked_at) == 1


def test_running_statistics_are_saved_and_come_back():
    """Training changes them besides the weights; without them a resumed BatchNorm would begin anew."""

    def with_norm(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(16, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    state = gathered(*with_norm(1))
    model, optimizer = with_norm(2)
    assert restored(model, optimizer, state)
    assert torch.equal(model[1].running_mean, state["buffer.1.running_mean"])
    del state["buffer.1.running_var"]
    assert not restored(model, optimizer, state)


def test_a_state_comes_back_into_wrapped_layers():
    """torch.compile and FSDP2's activation checkpointing put their own words into the names of parameters."""
    state = gathered(*trained(torch.optim.AdamW, seed=1))
    model, optimizer = trained(torch.optim.AdamW, seed=2)
    model[0] = checkpoint_wrapper(model[0])
    model[1].compile()
    assert restored(torch.compile(model), optimizer, state)
    assert torch.equal(model[0].weight, state["0.weight"])


def test_adapters_of_an_int8_base_are_saved_and_come_back():
    """Its state_dict has entries that are no attributes of its modules, at which torch's get_state_dict fails."""

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
