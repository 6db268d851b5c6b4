# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite: they change no weight, and their rows are recorded.

Before the optimizer's step the norm of the gradient decides, on all ranks alike, since they share
it. Where torch's fused kernels can decide by themselves, nothing waits for the device: the outcome
is looked at later, when the loop waits anyway. By then the schedule has counted the step.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType

from core.checkpoint import gather


@dataclass(frozen=True)
class UncheckedStep:
    """What is needed to check a step later.

    Attributes:
        norm: the norm of the gradient; None if the engine does not report it.
        held_back: whether the step is known to have changed nothing.
        rows: the numbers of the rows of each of this rank's micro-batches.
        losses: the loss of each of this rank's micro-batches.
    """

    step: int
    norm: Any
    held_back: bool
    rows: Sequence[Sequence[int]]
    losses: Sequence[torch.Tensor]


class NonFiniteSteps:
    """The steps of a run that were not finite, and the file with their rows.

    Attributes:
        left_out: the number of steps that --nonfinite skip has left out so far.
        unchecked: the steps since the last `check`.
    """

    def __init__(self, path: Path, budget: int) -> None:
        """Write rows to `path`; once `budget` steps were left out, the next one ends the run."""
        self.left_out = 0
        self._path = path
        self._budget = budget
        self.unchecked: list[UncheckedStep] = []

    def check(self, accelerator: Accelerator, group: Any) -> tuple[int, str] | None:
        """Check the steps since the last call. Those not finite changed no weight on any rank.

        Their rows are recorded: those whose loss is not finite or, if only the gradient is not, all
        rows of the step. Every rank takes part, and waits for its device.

        Returns:
            None, or the first step at which the run has to end, and why.
        """
        stop = None
        unchecked = self.unchecked
        self.unchecked = []
        for step in unchecked:
            if not step.held_back and (step.norm is None or math.isfinite(step.norm)):
                continue
            what, rows = find_cause(step, group)
            if what == "gradient" and accelerator.mixed_precision == "fp16":
                continue  # The loss scale was too large, which is how fp16 finds a fitting one.
            if accelerator.is_main_process:
                line = {"step": step.step, "what": what, "rows_by_rank": rows}
                with open(self._path, "a") as file:
                    file.write(json.dumps(line) + "\n")
            message = (
                f"the {what} of step {step.step} is not finite: no weight was changed; its rows "
                f"are in {self._path}"
            )
            if self.left_out < self._budget:
                self.left_out += 1
                accelerator.print(f"skipped: {message}", flush=True)
            elif stop is None:
                stop = step.step, message
        return stop


def hold_back(accelerator: Accelerator, optimizer: AcceleratedOptimizer, norm: Any) -> bool:
    """Have the optimizer's next step change nothing if the gradient is not finite.

    Args:
        norm: the whole norm of the gradient; a number or None if an engine returns it so.

    Returns:
        Whether the step is known to change nothing; False where torch's fused kernels decide on the
        device, since it is not known yet.
    """
    has_stepped = accelerator.distributed_type == DistributedType.DEEPSPEED  # It steps in backward.
    left_out = has_stepped and accelerator.optimizer_step_was_skipped
    if norm is None:
        return left_out
    inner = optimizer.optimizer
    is_tensor = isinstance(norm, torch.Tensor)
    if is_tensor and inner.defaults.get("fused") and not accelerator.scaler:
        weight = optimizer.param_groups[0]["params"][0]  # On the host if weights are offloaded.
        inner.grad_scale = None
        # The fused kernel leaves out its step if found_inf is 1.
        inner.found_inf = (1.0 - norm.isfinite().float()).to(weight.device)
        return left_out
    if math.isfinite(norm):
        return left_out
    if is_tensor:
        optimizer.zero_grad()  # Weights without a gradient are not updated.
    return True


def find_cause(step: UncheckedStep, group: Any) -> tuple[str, dict[int, list[int]]]:
    """Return what of a step is not finite, and the rows in question. Every rank takes part.

    Returns:
        "loss" and {rank: rows of the micro-batches whose loss is not finite}, or "gradient" and
        {rank: all rows}.
    """
    in_loss: list[int] = []
    in_step: list[int] = []
    for rows, loss in zip(step.rows, step.losses, strict=True):
        in_step += rows
        if not loss.isfinite():
            in_loss += rows
    by_rank = gather((in_loss, in_step), group)
    if any(rows for rows, _ in by_rank):
        return "loss", {rank: rows for rank, (rows, _) in enumerate(by_rank)}
    return "gradient", {rank: rows for rank, (_, rows) in enumerate(by_rank)}
