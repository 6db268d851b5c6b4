# SPDX-License-Identifier: Apache-2.0
"""The probe of the first step: an engine that averages otherwise than the recipes expect ends the
run, and a right one is left as it is."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from components.exits import Exit
from components.gradient_probe import GradientProbe
from components.strategy import backward_of_sum
from fakes import fake_accelerator

RANKS = 2
MICRO_BATCHES = 2


class Model(torch.nn.Module):
    """A linear layer and a norm, which may be checkpointed."""

    def __init__(self, checkpoints=False):
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)
        self.norm = torch.nn.LayerNorm(4, bias=False)
        self.checkpoints = checkpoints

    def forward(self, rows):
        hidden = self.linear(rows)
        if self.checkpoints:
            return checkpoint(self.norm, hidden, use_reentrant=False)
        return self.norm(hidden)


class ModelOfOneLayer(torch.nn.Module):
    """A model whose only layer has the linear layer and the norm."""

    def __init__(self):
        super().__init__()
        self.layer = Model()

    @property
    def norm(self):
        return self.layer.norm

    def forward(self, rows):
        return self.layer(rows)


class Job:
    """A run on two ranks with the same rows, of which this is one.

    Attributes:
        ended: the code and the message with which the probe ended the run, or None.
        printed: lines.
    """

    def __init__(self, model=None, divides_by=RANKS, mixed_precision="no", scale=None):
        """divides_by: by what the engine divides the sum of the gradients of both ranks; scale:
        fp16's loss scale."""
        self.scale = scale or 1.0
        scaler = SimpleNamespace(state_dict=lambda: {"scale": scale}) if scale else None
        torch.manual_seed(0)
        self.model = model or Model()
        self.divides_by = divides_by
        self.ended = None
        self.printed = []
        self.accelerator = fake_accelerator(
            num_processes=RANKS,
            gradient_accumulation_steps=MICRO_BATCHES,
            mixed_precision=mixed_precision,
            scaler=scaler,
            sync_gradients=False,
            backward=self.backward,
            reduce=lambda value: RANKS * value,
            print=self.printed.append,
        )
        self.probe = GradientProbe(self.accelerator, self.model, optimizer=None, end=self.end)
        self.accelerator.gradient_probe = self.probe

    def backward(self, loss):
        """What accelerate and the engine do; both ranks have the same gradient."""
        (self.scale * loss / MICRO_BATCHES).backward()
        if self.accelerator.sync_gradients:
            for weight in self.model.parameters():
                if weight.grad is not None:
                    weight.grad *= RANKS / self.divides_by

    def end(self, code, message):
        self.ended = (code, message)

    def step(self, factor=1.0):
        """Train a step, whose loss has a factor, and return the gradient of the norm."""
        self.model.zero_grad()
        for number in range(MICRO_BATCHES):
            self.accelerator.sync_gradients = number == MICRO_BATCHES - 1
            rows = torch.arange(6.0).view(2, 3) + number**2
            loss = self.model(rows).square().sum() * factor
            backward_of_sum(self.accelerator, loss)
        return self.model.norm.weight.grad.clone()

    @property
    def is_watched(self):
        return self.accelerator.gradient_probe is not None


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_right_gradient_is_left_as_it_is(checkpoints):
    job = Job(Model(checkpoints))
    plain = Job(Model(checkpoints))
    plain.model.load_state_dict(job.model.state_dict())
    plain.accelerator.gradient_probe = None
    assert torch.equal(job.step(), plain.step())
    assert job.ended is None and not job.is_watched and job.printed == []


@pytest.mark.parametrize("divides_by", [1, 4, 3])
def test_an_engine_that_divides_by_another_number_ends_the_run(divides_by):
    job = Job(divides_by=divides_by)
    job.step()
    code, message = job.ended
    assert code == Exit.DIFFERS and "trains norm.weight with" in message and "\n" not in message
    assert f"{RANKS / divides_by:.4g} times its gradient" in message


def test_a_loss_that_is_not_multiplied_ends_the_run(monkeypatch):
    monkeypatch.setattr("components.strategy.Mesh.averaged", lambda *_: 1)
    job = Job()
    job.step()
    assert "0.5 times its gradient" in job.ended[1]


@pytest.mark.parametrize("scale", [1024.0, None])
def test_a_loss_scale_is_no_wrong_factor(scale):
    job = Job(mixed_precision="fp16", scale=scale)
    job.step()
    assert job.ended is None and not job.is_watched


@pytest.mark.parametrize("factor", [float("inf"), float("nan"), 0.0])
def test_the_first_gradient_that_is_finite_and_not_zero_is_compared(factor):
    job = Job(divides_by=1)
    job.step(factor)
    assert job.ended is None and job.is_watched
    job.step()
    assert "2 times its gradient" in job.ended[1]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_layer_is_watched_without_being_compiled_again(in_place):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    model = ModelOfOneLayer()
    if in_place:  # as accelerate does for FSDP2 and DeepSpeed
        model.layer.compile(backend=backend)
    else:
        model.layer = torch.compile(model.layer, backend=backend)
    job = Job(model, divides_by=1)
    for _ in range(2):
        job.step()
    assert "2 times its gradient" in job.ended[1] and not job.is_watched
    assert len(graphs) == 1


@pytest.mark.parametrize(("mixed_precision", "ends"), [("no", True), ("bf16", False)])
def test_rounding_is_a_difference_in_fp32_only(mixed_precision, ends):
    job = Job(divides_by=RANKS * 1.005, mixed_precision=mixed_precision)
    job.step()
    assert (job.ended is not None) == ends
