# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of matrices that tensor parallelism splits.

An adapter adds B A x to what a matrix puts out. A matrix that is split by its output has the whole
x on each rank, and each rank its rows of B: what comes back to A is summed over the ranks. One that
is split by its input has a part of x on each rank, with the columns of A that belong to it: what A
puts out is summed before B. The other half of an adapter stays whole, and has equal gradients on
all ranks of a group. Both halves start as in one process, since they are drawn whole.
"""

from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers.distributed.parallel_utils import (
    ALL_PARALLEL_STYLES,
    replace_layer_number_by_wildcard,
)
from transformers.distributed.tensor_parallel import ColwiseParallel, RowwiseParallel

from components import upstream
from components.mesh import Mesh


class DropoutOfPart(torch.nn.Module):
    """Dropout of a rank's part of the features, with the part of the mask that one process draws.

    The ranks of a group draw the same numbers, so that each would drop the same places of its part.
    """

    def __init__(self, p: float, part: int, parts: int) -> None:
        """Keep what to draw.

        Args:
            p: the probability that a feature is dropped.
            part: the number of this rank's part, from 0.
            parts: their number.
        """
        super().__init__()
        self.p = p
        self.part = part
        self.parts = parts

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return the features, [..., features of this rank], in training with some dropped."""
        if not self.training:
            return features
        *places, width = features.shape
        whole = features.new_ones(*places, width * self.parts)
        mask = torch.nn.functional.dropout(whole, self.p)
        return features * mask.chunk(self.parts, -1)[self.part]


def split_adapters(model: Any, accelerator: Accelerator) -> None:
    """Split peft's adapters and copies of modules as what they adapt or replace.

    Every rank of a group takes part.

    Args:
        model: with adapters that are whole, as `upstream.making_whole_adapters` has them made.
    """
    if Mesh.of(accelerator).tp == 1:
        return
    for layer, style in adapters_with_style(model):
        split_adapter(layer, style)
    for copied, style in copies_with_style(model):
        upstream.run_copy_by_itself(copied, style)
        upstream.keep_gradients_split(copied)


def adapters_with_style(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each adapted layer whose weight is split, and transformers' style of the split."""
    from peft.tuners.lora import LoraLayer

    base = model.get_base_model()
    for path, module in base.named_modules():
        style = style_of(base, path)
        if isinstance(module, LoraLayer) and style is not None:
            yield module, style


def copies_with_style(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each layer in the copies of --modules_to_save that is split, and its style."""
    from peft.utils.other import ModulesToSaveWrapper

    base = model.get_base_model()
    for path, module in base.named_modules():
        if not isinstance(module, ModulesToSaveWrapper):
            continue
        for copied in module.modules_to_save.values():
            for end, layer in copied.named_modules():
                style = style_of(base, f"{path}.{end}" if end else path)
                if style is not None:
                    yield layer, style


def style_of(base: Any, path: str) -> Any:
    """Return transformers' style by which a module of a model is split, or None if it is whole."""
    name = base.tp_plan.get(replace_layer_number_by_wildcard(path))
    return None if name is None else ALL_PARALLEL_STYLES[name]


def split_adapter(layer: Any, style: Any) -> None:
    """Split one half of each adapter of a layer, and leave the other one whole.

    Args:
        layer: peft's, around a layer that is split.
        style: of transformers, by which that layer is split.
    """
    mesh = layer.get_base_layer().weight.device_mesh
    halves = layer.lora_B if isinstance(style, ColwiseParallel) else layer.lora_A
    for half in halves.values():
        style.shard_param(half, "weight", mesh)
        half.weight = torch.nn.Parameter(own_part(half.weight), half.weight.requires_grad)
        style.install_forward(half, mesh)
    if isinstance(style, RowwiseParallel):
        for name, dropout in layer.lora_dropout.items():
            if isinstance(dropout, torch.nn.Dropout):
                rank = mesh.get_local_rank()
                layer.lora_dropout[name] = DropoutOfPart(dropout.p, rank, mesh.size())


def own_part(weight: DTensor) -> DTensor:
    """Return a split weight whose part has memory of its own, and is no view of the whole."""
    return DTensor.from_local(
        weight.to_local().detach().clone(),
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
