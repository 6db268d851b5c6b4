# SPDX-License-Identifier: Apache-2.0
"""Hooks of a float8 base (core/extras.py): its flag, what would be wrong, and the conversion."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from core.cli import arg
from core.engine import is_sharded, read_on_every_rank
from core.workarounds import fsdp_plugin, mixed_dtype
from extras.float8.linear import convert

OTHERS = ("load_in_8bit", "load_in_4bit", "use_dora")
# Strategies under which loss, result and resumed run were compared with those of one process
PROVEN = ("one process", "DDP", "FSDP2 FULL_SHARD")
CAPABILITY = (8, 9)  # from which on a GPU multiplies e4m3


@dataclass(kw_only=True)
class Arguments:
    """A frozen base in float8."""

    load_in_fp8: bool = arg(False, "load the base in float8 (e4m3) and multiply in it")

    def conflicts(self) -> Iterator[str]:
        if not self.load_in_fp8:
            return
        if not getattr(self, "use_peft", False):
            yield "--load_in_fp8 is for LoRA adapters: add --use_peft"
        for name in OTHERS:  # DoRA would take the norms of weights without their scales
            if getattr(self, name, False):
                yield f"--load_in_fp8 and --{name}: choose one"


def find_faults(args: Any, layout: Any) -> Iterator[str]:
    """Yield why a base cannot be in float8 here; else have every rank read it under FSDP2."""
    if not args.load_in_fp8:
        return
    if layout.strategy not in PROVEN:
        yield f"--load_in_fp8 is not proven under {layout.strategy}: use ddp.yaml or fsdp.yaml"
    elif is_sharded(layout.accelerator):
        read_on_every_rank(layout.accelerator)  # The first one would not send the scales
        if isinstance(fsdp_plugin(layout.accelerator).cpu_offload, CPUOffloadPolicy):
            yield "--load_in_fp8 is not proven with weights on the host: use fsdp.yaml"
        computes_in = mixed_dtype(layout.accelerator) or args.dtype
        if args.dtype != computes_in:
            yield (
                f"--load_in_fp8: {layout.strategy} would cast, and so destroy, weights that are "
                f"not stored in what it computes in: use --dtype {computes_in}"
            )
    if layout.device.type == "cuda":
        found = torch.cuda.get_device_capability(layout.device)
        if found < CAPABILITY:
            yield (
                f"--load_in_fp8 needs compute capability {CAPABILITY[0]}.{CAPABILITY[1]} (Ada, "
                f"Hopper or newer), and this GPU has {found[0]}.{found[1]}: use --load_in_8bit"
            )


def loaded(args: Any, layout: Any, model: Any) -> None:
    """Convert the layers of a base that has been loaded."""
    if args.load_in_fp8:
        convert(model, layout, args.modules_to_save)
