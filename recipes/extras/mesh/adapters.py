# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters of matrices that tensor parallelism splits.

An adapter adds B A x to what a matrix puts out. A matrix that is split by its output has the whole
x on each rank, and each rank its rows of B: what comes back to A is summed over the ranks. One that
is split by its input has a part of x on each rank, with the columns of A that belong to it: what A
puts out is summed before B. The other half of an adapter stays whole, and has equal gradients on
all ranks of a group. Both halves start as in one process, since they are drawn whole.
"""

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from transformers.distributed.parallel_utils import (
    ALL_PARALLEL_STYLES,
    replace_layer_number_by_wildcard,
)
from transformers.distributed.tensor_parallel import (
    ColwiseParallel,
    EmbeddingParallel,
    RowwiseParallel,
)

from core.engine import own_parts_only
from extras.mesh import workarounds


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


def split_adapters(base: Any, mesh: DeviceMesh) -> None:
    """Split peft's adapters and copies of modules as what they adapt or replace.

    Every rank of a group takes part.

    Args:
        base: the model in which peft has put whole adapters.
        mesh: the ranks of a group.

    Raises:
        ValueError: if an adapter cannot follow the split.
    """
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper

    for path, module in base.named_modules():
        if isinstance(module, LoraLayer):
            split_adapters_of(module, path, style_of(base, path), mesh)
        elif isinstance(module, ModulesToSaveWrapper):
            for copied in module.modules_to_save.values():
                split_copy(base, path, copied, mesh)
    own_parts_only(base)


def split_copy(base: Any, path: str, copied: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Have the layers of a copy of the module at `path` compute as the original's, with parts."""
    for end, layer in copied.named_modules():
        style = style_of(base, f"{path}.{end}".rstrip("."))
        if style is not None:
            workarounds.run_copy_by_itself(layer, style, mesh)
            workarounds.keep_gradients_split(layer)


def style_of(base: Any, path: str) -> Any:
    """Return transformers' style by which a module of a model is split, or None if it is whole."""
    name = base.tp_plan.get(replace_layer_number_by_wildcard(path))
    return None if name is None else ALL_PARALLEL_STYLES[name]


def split_adapters_of(layer: Any, path: str, style: Any, mesh: DeviceMesh) -> None:
    """Split one half of each adapter of a layer, and leave the other one whole.

    Args:
        layer: peft's, around the layer at `path`.
        style: of transformers, by which that layer is split, or None.
        mesh: the ranks of a group.

    Raises:
        ValueError: if it is split in a way that adapters cannot follow.
    """
    # DoRA takes norms over whole matrices
    can_follow = not any(getattr(layer, "use_dora", {}).values())
    if can_follow and isinstance(style, ColwiseParallel):
        split_halves(layer.lora_B, style, mesh)
    elif can_follow and isinstance(style, RowwiseParallel):
        split_halves(layer.lora_A, style, mesh)
        if isinstance(style.input_layouts, Shard):
            draw_parts_of_masks(layer, mesh)
    # An embedding puts out whole vectors, and so does its adapter, which stays whole.
    elif style is not None and not isinstance(style, EmbeddingParallel):
        raise ValueError(
            f"--use_peft: tensor parallelism splits {path} in a way that these adapters cannot "
            "follow: leave it out of --lora_target_modules, or use fsdp2_full_shard.yaml"
        )


def split_halves(halves: torch.nn.ModuleDict, style: Any, mesh: DeviceMesh) -> None:
    """Split one of the two matrices of each adapter of a layer as the layer is split."""
    for half in halves.values():
        style.shard_param(half, "weight", mesh)
        style.install_forward(half, mesh)


def draw_parts_of_masks(layer: Any, mesh: DeviceMesh) -> None:
    """Have the dropout before the adapters of a layer drop what one process would drop."""
    for name, dropout in layer.lora_dropout.items():
        if isinstance(dropout, torch.nn.Dropout):
            rank = mesh.get_local_rank()
            layer.lora_dropout[name] = DropoutOfPart(dropout.p, rank, mesh.size())
