# SPDX-License-Identifier: Apache-2.0
"""Workarounds for what torch gets wrong in pipelines (recipes/core/workarounds.py)."""

from typing import Any

from core.workarounds import workaround


@workaround(
    "torch/distributed/pipelining/stage.py, _post_metadata_inference_cleanup", seen="torch 2.13"
)
def keep_gradients_of_shards(stage: Any) -> None:
    """Have a stage of a pipeline keep FSDP2's gradients when a schedule first runs it.

    torch drops them, as what is left of a trial run that finds out shapes. Here shapes are given,
    so there is none, and the gradients are those of earlier batches of the optimizer step.
    """
    stage._post_metadata_inference_cleanup = lambda: None


@workaround("torch/distributed/pipelining/schedules.py, _step_microbatches", seen="torch 2.13")
def run_only_forward(schedule: Any) -> None:
    """Have the eval() of a schedule with several stages per rank leave out backward passes.

    torch goes through them without doing anything, and fails where two stages that follow each
    other are on one rank, as in ZBV: "can't steal_bwd_input if this stage doesn't have backward".
    """
    needed = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    for rank, actions in schedule.pipeline_order_with_comms.items():
        kept = [action for action in actions if action.computation_type.name in needed]
        schedule.pipeline_order_with_comms[rank] = kept
