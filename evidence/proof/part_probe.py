# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: the part of the weights, rows and tokens that it has.

Noted are the forward passes of the first step, in which the weights are still those of the model's
files, so that `pictures.parts` finds each part in the whole by its values.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch.optim.optimizer import Optimizer
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts, MixtralModel

HELD = "held."  # starts the name of a weight as it is between forward passes
USED = "used."  # starts that of a weight as a layer multiplies with it
# Matrices of each layer: TP splits the first by rows, the second by columns.
MATRICES = ("up_proj", "down_proj")


def track(path: Path) -> None:
    """Write a line of JSON to `path` for each forward pass.

    The weights are in a file beside it, whose name ends with .safetensors.
    """
    parts = Parts(path)
    prepare = Accelerator.prepare
    multiply = torch.nn.Linear.forward

    @functools.wraps(prepare)
    def prepare_and_begin(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        result = prepare(self, *args, **kwargs)
        if any(isinstance(argument, Optimizer) for argument in args):
            parts.has_begun = True
        return result

    @functools.wraps(multiply)
    def note_and_multiply(self: torch.nn.Linear, *args: Any, **kwargs: Any) -> torch.Tensor:
        parts.note_use(self)
        return multiply(self, *args, **kwargs)

    Accelerator.prepare = prepare_and_begin
    for kind in (LlamaModel, MixtralModel):
        kind.forward = noting(kind.forward, parts)
    torch.nn.Linear.forward = note_and_multiply


def noting(forward: Callable[..., Any], parts: "Parts") -> Callable[..., Any]:
    """Return the forward pass of a model, with what the rank has then noted in `parts`."""

    @functools.wraps(forward)
    def note_and_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts.note_inputs(self, kwargs)
        result = forward(self, *args, **kwargs)
        parts.save()
        return result

    return note_and_forward


class Parts:
    """What one rank has, and the files to which it is written.

    Attributes:
        has_begun: whether the model and its optimizer are ready for the first step.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.has_begun = False
        self.file = open(path, "w", buffering=1)
        self.names: dict[int, str] = {}  # layers with noted matrices, by their identity
        self.weights: dict[str, torch.Tensor] = {}
        self.is_saved = False

    def note_inputs(self, model: Any, inputs: dict[str, Any]) -> None:
        """Write what a forward pass is given, and keep the weights before the first one.

        Args:
            inputs: arguments of the model by name: tokens, or hidden states of another rank.
        """
        if not self.has_begun:
            return
        ids = inputs.get("input_ids")
        positions = inputs.get("position_ids")
        line: dict[str, Any] = {"ids": None, "positions": None}
        if ids is not None:
            line["ids"] = ids.tolist()
        if positions is not None:
            line["positions"] = positions.tolist()
        self.file.write(json.dumps(line) + "\n")
        if not self.names:
            self.note_held(model)

    def note_held(self, model: torch.nn.Module) -> None:
        """Keep the matrices as the rank has them between forward passes."""
        for name, module in model.named_modules():
            if name.endswith(MATRICES):
                self.names[id(module)] = name
                # ZeRO-3 keeps in `ds_tensor`, one line of numbers, what outlives the passes.
                self.weights[HELD + name] = copy_of(
                    getattr(module.weight, "ds_tensor", module.weight)
                )
            elif isinstance(module, MixtralExperts):
                self.note_experts(HELD, name, module)
                module.register_forward_pre_hook(
                    lambda experts, _, name=name: self.note_experts(USED, name, experts)
                )

    def note_experts(self, kind: str, name: str, experts: Any) -> None:
        """Keep the matrices of the experts of a layer, as if they were those of one MLP.

        Args:
            kind: HELD or USED.
            name: of the module of the experts.
        """
        if self.is_saved:
            return
        self.names[id(experts)] = name
        for matrix, part in matrices_of_experts(experts).items():
            self.weights[f"{kind}{name.removesuffix('experts')}{matrix}"] = part

    def note_use(self, layer: torch.nn.Linear) -> None:
        """Keep a matrix as the layer multiplies with it."""
        name = self.names.get(id(layer))
        if name and not self.is_saved:
            self.weights[USED + name] = copy_of(layer.weight)

    def save(self) -> None:
        """Write the weights after the first forward pass."""
        if self.names and not self.is_saved:
            save_file(self.weights, f"{self.path}.safetensors")
            self.is_saved = True


def matrices_of_experts(experts: Any) -> dict[str, torch.Tensor]:
    """Return the first and the second matrix of this rank's experts, side by side.

    They are [all their neurons, features] and [features, all their neurons], as those of an MLP.
    """
    gate_and_up = copy_of(experts.gate_up_proj)  # [experts, 2 x neurons of each, features]
    up = gate_and_up.chunk(2, dim=1)[1].flatten(0, 1)
    down = torch.cat(list(copy_of(experts.down_proj)), dim=1)
    return {MATRICES[0]: up.contiguous(), MATRICES[1]: down}


def copy_of(weight: Any) -> torch.Tensor:
    """Return a copy of what this rank has of a weight."""
    local = weight
    if hasattr(weight, "to_local"):
        local = weight.to_local()
    return local.detach().clone().contiguous()
