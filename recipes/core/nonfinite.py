# SPDX-License-Identifier: Apache-2.0
"""Steps that are not finite: they change no weight, and their rows are recorded.

Before the optimizer's step the norm of the gradient decides, on all ranks alike, since they share
it. Where torch's fused kernels can decide by themselves, nothing waits for the device: the outcome
is looked at later, when the loop waits anyway. By then the schedule has counted the step.
"""

import json
import math
from collections.abc import Mapping, Sequence
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

    def changed_weights(self) -> bool:
        """Return whether the step changed the weights. Waits for the device."""
        if self.held_back:
            return False
        return self.norm is None or math.isfinite(self.norm)

    def is_known_not_finite(self) -> bool:
        """Return whether the norm is on the host, so that nothing has to wait, and not finite."""
        return isinstance(self.norm, float) and not math.isfinite(self.norm)

    def rows_not_finite(self) -> list[int]:
        """Return the rows of this rank's micro-batches whose loss is not finite."""
        found: list[int] = []
        for rows, loss in zip(self.rows, self.losses, strict=True):
            if not loss.isfinite():
                found += rows
        return found

    def all_rows(self) -> list[int]:
        """Return the rows of all of this rank's micro-batches."""
        return [row for rows in self.rows for row in rows]


def hold_back(accelerator: Accelerator, optimizer: AcceleratedOptimizer, norm: Any) -> bool:
    """Have the optimizer's next step change nothing if the gradient is not finite.

    Call it before optimizer.step().

    Args:
        norm: the norm of the gradient, from `whole_norm`; a number or None if an engine returns it
            so.

    Returns:
        Whether the step is known to change nothing; False where torch's fused kernels decide on the
        device, since it is not known yet.
    """
    has_stepped = accelerator.distributed_type == DistributedType.DEEPSPEED  # It steps in backward.
    left_out = has_stepped and accelerator.optimizer_step_was_skipped
    if not isinstance(norm, torch.Tensor):
        return left_out
    inner = optimizer.optimizer
    if inner.defaults.get("fused") and not accelerator.scaler:
        weight = optimizer.param_groups[0]["params"][0]  # On the host if weights are offloaded.
        inner.grad_scale = None
        # The fused kernel leaves out its step if found_inf is 1.
        inner.found_inf = (1.0 - norm.isfinite().float()).to(weight.device)
        return left_out
    if math.isfinite(norm):
        return left_out
    optimizer.zero_grad()  # Weights without a gradient are not updated.
    return True


def whole_norm(grad_norm: Any) -> Any:
    """Return the whole of a norm, which FSDP2 returns as a DTensor; a number or None as it is."""
    if hasattr(grad_norm, "full_tensor"):
        return grad_norm.full_tensor()
    return grad_norm


class NonFiniteSteps:
    """The steps of a run that were not finite, and the file with their rows.

    Attributes:
        left_out: the number of steps that --nonfinite skip has left out so far.
    """

    def __init__(self, path: Path, budget: int) -> None:
        """Know where the rows are written.

        Args:
            path: of the file with the rows.
            budget: the number of steps that may be left out; with 0 the first one ends the run.
        """
        self.left_out = 0
        self._path = path
        self._budget = budget
        self._unchecked: list[UncheckedStep] = []

    def note(self, step: UncheckedStep) -> None:
        """Remember a step until `check`."""
        self._unchecked.append(step)

    def check(self, accelerator: Accelerator, group: Any) -> tuple[int, str] | None:
        """Check the steps since the last call. Those not finite changed no weight on any rank.

        Their rows are recorded: those whose loss is not finite or, if only the gradient is not, all
        rows of the step. Every rank takes part.

        Args:
            group: of all ranks.

        Returns:
            None, or the first step at which the run has to end, and why.
        """
        stop = None
        unchecked = self._unchecked
        self._unchecked = []
        for step in unchecked:
            if step.changed_weights():
                continue
            what, rows = find_cause(step, group)
            if what == "gradient" and accelerator.mixed_precision == "fp16":
                continue  # The loss scale was too large, which is how fp16 finds a fitting one.
            if accelerator.is_main_process:
                is_first = self.left_out == 0 and stop is None
                self._write(step.step, what, rows, is_first)
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

    def _write(self, step: int, what: str, rows: Mapping[int, list[int]], is_first: bool) -> None:
        """Add a line to the file, which the first step of a run replaces."""
        with open(self._path, "w" if is_first else "a") as file:
            file.write(json.dumps({"step": step, "what": what, "rows_by_rank": rows}) + "\n")


def find_cause(step: UncheckedStep, group: Any) -> tuple[str, dict[int, list[int]]]:
    """Return what of a step is not finite, and the rows in question. Every rank takes part.

    Returns:
        "loss" and {rank: rows of the micro-batches whose loss is not finite}, or "gradient" and
        {rank: all rows}.
    """
    found = gather((step.rows_not_finite(), step.all_rows()), group)
    if any(rows for rows, _ in found):
        return "loss", {rank: rows for rank, (rows, _) in enumerate(found)}
    return "gradient", {rank: rows for rank, (_, rows) in enumerate(found)}
