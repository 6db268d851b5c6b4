# SPDX-License-Identifier: Apache-2.0
"""Where the experts of a mixture are in a GGUF, which holds those of a layer in three tensors.

In a folder each expert is a tensor of its own, as on the hub, or those of a layer are two tensors,
as transformers 5 has them in memory: gate_up_proj, [experts, 2 x inner, hidden], and down_proj.
"""

import re
from dataclasses import dataclass
from enum import Enum

import torch

# Mixtral's names, and those of all others
STACKS = {
    "w1": "gate",
    "gate_proj": "gate",
    "w3": "up",
    "up_proj": "up",
    "w2": "down",
    "down_proj": "down",
}
EXPERT = re.compile(
    r"layers\.(?P<layer>\d+)\..*experts\.(?P<number>\d+)\.(?P<kind>w[123]|\w+_proj)\.weight$"
)
FUSED = re.compile(r"layers\.(?P<layer>\d+)\..*\bexperts\.(?P<kind>gate_up_proj|down_proj)$")
# The weights of their experts are [experts, in, out], and those of gpt-oss alternate gate and up
OTHER_LAYOUTS = ("gpt-oss", "llama4")


class Half(Enum):
    """Which half of the rows of gate_up_proj."""

    GATE = 0
    UP = 1


@dataclass(frozen=True)
class Place:
    """Where a tensor of a folder, or one half of it, is in a GGUF.

    Attributes:
        own: llama.cpp's name of the tensor.
        expert: its number in that tensor; None if it is all of it.
        half: of the folder's tensor; None if it is all of it.
    """

    own: str
    expert: int | None = None
    half: Half | None = None

    def take(self, ours: torch.Tensor) -> torch.Tensor:
        """Return the part of a folder's tensor that is at this place."""
        if self.half is None:
            return ours
        return ours.chunk(2, dim=-2)[self.half.value]


def find_places(name: str, architecture: str) -> list[Place]:
    """Return where a folder's tensor of experts is in a GGUF; nothing if it is not known.

    Args:
        name: of the folder's tensor.
        architecture: llama.cpp's name of the kind of model.
    """
    single = EXPERT.search(name)
    if single is not None and single["kind"] in STACKS:
        own = stack_of(single["layer"], STACKS[single["kind"]])
        return [Place(own, expert=int(single["number"]))]
    fused = FUSED.search(name)
    if fused is None or architecture in OTHER_LAYOUTS:
        return []
    if fused["kind"] == "down_proj":
        return [Place(stack_of(fused["layer"], "down"))]
    return [
        Place(stack_of(fused["layer"], "gate"), half=Half.GATE),
        Place(stack_of(fused["layer"], "up"), half=Half.UP),
    ]


def stack_of(layer: str, kind: str) -> str:
    """Return llama.cpp's name of the tensor with all experts of a layer: "gate", "up" or "down"."""
    return f"blk.{layer}.ffn_{kind}_exps.weight"
