# SPDX-License-Identifier: Apache-2.0
"""The probe of a pipeline's first step: gradients that are not the sum over micro-batches and
pipelines end the run."""

import pytest
import torch

from components import pipeline_probe
from components.exits import Exit
from components.pipeline_probe import PipelineProbe
from fakes import fake_accelerator

PIPELINES = 2
MICRO_BATCHES = 3


class Layers(torch.nn.Module):
    """Two layers, of which each has a matrix and a norm."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.LayerNorm(4))
            for _ in range(2)
        )

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Job:
    """One of two pipelines with the same rows.

    Attributes:
        ended: the code and the message with which the probe ended the run, or None.
    """

    def __init__(self, monkeypatch):
        monkeypatch.setattr(
            pipeline_probe.dist, "all_reduce", lambda value, group: value.mul_(PIPELINES)
        )
        monkeypatch.setattr(pipeline_probe, "gather_object", lambda found: found)
        torch.manual_seed(0)
        self.model = Layers()
        self.ended = None
        self.accelerator = fake_accelerator(num_processes=2 * PIPELINES)
        self.probe = PipelineProbe(self.accelerator, self.model, self.end)
        self.accelerator.pipeline_probe = self.probe

    def end(self, code, message):
        self.ended = (code, message)

    def step(self, averaged=1, off=1.0, factor=1.0, of_layer=None):
        """Train a step, after which gradients, or those of a layer, are off by a factor."""
        self.model.zero_grad()
        for number in range(MICRO_BATCHES):
            rows = torch.arange(8.0).view(2, 4) ** (number + 1)
            loss = self.model(rows).pow(3).sum() * factor
            (loss * averaged).backward()
        wrong = self.model if of_layer is None else self.model.layers[of_layer]
        for weight in self.model.parameters():
            weight.grad *= PIPELINES / averaged
        for weight in wrong.parameters():
            weight.grad *= off
        self.probe.compare(None, averaged)

    @property
    def is_watched(self):
        return self.accelerator.pipeline_probe is not None


@pytest.fixture
def job(monkeypatch):
    return Job(monkeypatch)


@pytest.mark.parametrize("averaged", [1, PIPELINES])
def test_right_gradients_are_left_as_they_are(job, averaged):
    job.step(averaged)
    assert job.ended is None and not job.is_watched
    job.model(torch.ones(1, 4)).sum().backward()
    assert not any(module._forward_pre_hooks for module in job.model.modules())
    assert not any(weight._backward_hooks for weight in job.model.parameters())


@pytest.mark.parametrize("layer", [0, 1])
def test_the_gradient_of_any_layer_may_end_the_run(job, layer):
    job.step(off=0.5, of_layer=layer)
    code, message = job.ended
    assert code == Exit.DIFFERS and "\n" not in message
    assert f"layers.{layer}.1.bias with 0.5 times its gradient" in message


@pytest.mark.parametrize("factor", [float("nan"), 0.0])
def test_the_first_gradients_that_are_finite_and_not_zero_are_compared(job, factor):
    job.step(off=2.0, factor=factor)
    assert job.ended is None and job.is_watched
    job.step(off=2.0)
    assert "2 times its gradient" in job.ended[1]
