# SPDX-License-Identifier: Apache-2.0
"""The probe of the first step of a pipeline (components/gradient_probe.py is that of others).

A schedule of torch adds up the gradients of the micro-batches, and replicas and shards are added up
over pipelines by other code. So one weight of each layer is watched, and with it every stage: the
probe adds up what autograd computes for it in each micro-batch of each pipeline, and compares the
sum with what the optimizer is given. It does not see whether the stages have the rows of the same
batch, or what is summed over stages: the norm, and the gradient of tied embeddings.
"""

import math
import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import gather_object

from components.exits import Exit
from components.gradient_probe import bound_of, choose_weight, describe_difference
from components.strategy import Strategy
from components.watched_weight import WatchedWeight, parts_of_rank, products_of

LAYER = re.compile(r"\blayers\.\d+\.")


class PipelineProbe:
    """Watches one weight of each layer until a step has shown that their gradients are right.

    Every rank makes every call. The first step counts whose gradients are finite and not zero.
    """

    def __init__(
        self, accelerator: Accelerator, model: torch.nn.Module, end: Callable[[int, str], None]
    ) -> None:
        """Hook the modules that use the weights.

        Args:
            model: the part of this rank.
            end: ends all ranks with an exit code and a message.
        """
        self._accelerator = accelerator
        self._end = end
        names = [name for name, weight in model.named_parameters() if weight.requires_grad]
        self._watched = [WatchedWeight(model, name) for name in one_of_each_layer(names)]
        for watched in self._watched:
            watched.factor = 1.0  # Every backward pass is one of the loss

    def compare(self, over_pipelines: Any, averaged: int) -> None:
        """Compare the gradients of a step with those of its micro-batches; end if they differ.

        Args:
            over_pipelines: the process group of the ranks that have the same stages.
            averaged: by which the losses were multiplied, and gradients are divided.
        """
        products = []
        for watched in self._watched:
            expected = watched.take() / averaged
            dist.all_reduce(expected, group=over_pipelines)
            products.append(products_of(*parts_of_rank(watched.weight.grad, expected)))
        total = torch.stack(products)
        dist.all_reduce(total, group=over_pipelines)
        found = []
        for watched, (along, square, off) in zip(self._watched, total.tolist(), strict=True):
            bound = bound_of(self._accelerator, watched.weight)
            found.append((watched.name, along, square, off, bound))
        everywhere = gather_object(found)
        for _, _, square, off, _ in everywhere:
            if square == 0 or not math.isfinite(square + off):
                return
        self._stop_watching()
        for name, along, square, off, bound in everywhere:
            difference = math.sqrt(off / square)
            if difference > bound:
                cure = "correct components/pipeline.py"
                self._end(
                    Exit.DIFFERS,
                    f"{Strategy.of(self._accelerator).name} trains "
                    f"{describe_difference(name, along / square, difference, cure)}",
                )

    def _stop_watching(self) -> None:
        """Remove hooks and probe: the next steps are as if there had been none."""
        for watched in self._watched:
            watched.stop()
        self._accelerator.pipeline_probe = None  # pyrefly: ignore[missing-attribute]


def one_of_each_layer(names: Iterable[str]) -> list[str]:
    """Return the name of a small weight of each layer, from the names of all trained weights."""
    by_layer: dict[str, list[str]] = {}
    for name in names:
        layer = LAYER.search(name)
        if layer:
            by_layer.setdefault(layer[0], []).append(name)
    return [choose_weight(of_layer) for of_layer in by_layer.values()]
