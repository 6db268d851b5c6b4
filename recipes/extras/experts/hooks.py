# SPDX-License-Identifier: Apache-2.0
"""Hooks of expert parallelism (core/extras.py): its flag, layout, and what would be wrong."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator

from core.cli import Bounds, free
from core.engine import read_on_every_rank, zero_stage
from core.workarounds import fsdp_plugin
from extras.experts import workarounds
from extras.experts.layout import ExpertLayout, average_under_ddp


@dataclass(kw_only=True)
class Arguments:
    """How experts are spread over ranks."""

    ep_size: int = free(
        1,
        "ranks that share the experts of each layer, each with some of them whole, and with rows "
        "of its own (ep.yaml, fsdp2_ep.yaml); 1 leaves all experts on each rank",
        Bounds(least=1),
    )


def layout(args: Any, accelerator: Accelerator) -> ExpertLayout | None:
    """Return the layout of --ep_size; None if no experts are spread."""
    if args.ep_size == 1:
        return None
    found = ExpertLayout(accelerator, {"ep": args.ep_size})
    if fsdp_plugin(accelerator) is not None:
        read_on_every_rank(accelerator)  # FSDP would broadcast the experts of rank 0
    else:
        prepare_for_ddp(accelerator, found)
    return found


def prepare_for_ddp(accelerator: Any, layout: ExpertLayout) -> None:
    """Have `prepare` leave experts to the ranks that have them, and average their gradients."""
    prepare = accelerator.prepare_model

    def prepare_model(model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        workarounds.leave_experts_out_of_ddp(model)
        with workarounds.ddp_takes_split_weights():
            model = prepare(model, *args, **options)
        average_under_ddp(model, layout.mesh)
        return model

    accelerator.prepare_model = prepare_model


def find_faults(args: Any, layout: Any) -> Iterator[str]:
    """Yield a problem for each thing under which spread experts would train otherwise."""
    if not isinstance(layout, ExpertLayout):
        return
    ranks = layout.accelerator.num_processes
    if ranks % args.ep_size:
        yield f"--ep_size {args.ep_size} does not divide {ranks} ranks: use another one of both"
    plugin = fsdp_plugin(layout.accelerator)
    if zero_stage(layout.accelerator) is not None or (plugin and plugin.fsdp_version == 1):
        yield (
            f"--ep_size: {layout.strategy} cannot leave experts to the ranks that have them: use "
            "ep.yaml or fsdp2_ep.yaml"
        )
    if args.use_peft and args.lora_target_parameters:
        # peft/tuners/lora/layer.py, ParamWrapper
        yield (
            "--use_peft: peft makes adapters for all experts on each rank, which do not fit the "
            "rank's own: use --lora_target_parameters without a value, or leave --ep_size out"
        )
    if layout.accelerator.mixed_precision == "fp16":
        yield (
            "--ep_size: the loss scale of fp16 would be that of each rank's own experts: use "
            "mixed_precision: bf16"
        )
