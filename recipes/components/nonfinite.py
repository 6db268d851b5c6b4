"""Numbers that are not finite: such a step changes no weight, and its rows are written down.

Before the optimizer's step the gradient's norm decides, on all ranks alike, since they share it.
The device is not waited for where torch's fused kernels can decide themselves; what happened is
looked at later, when the loop waits anyway.
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
from accelerate.utils import gather_object

from components.folder import NONFINITE_ROWS
from components.status import RANK
from components.strategy import Strategy


@dataclass(frozen=True)
class UncheckedStep:
    """What is needed to look at a step later.

    Attributes:
        norm: norm of the gradient; None where the engine does not tell.
        held_back: whether the step is known to have changed nothing.
        rows: numbers of the rows of each micro-batch of this rank.
        losses: of each micro-batch of this rank.
    """

    step: int
    norm: Any
    held_back: bool
    rows: Sequence[Sequence[int]]
    losses: Sequence[torch.Tensor]

    @property
    def is_finite(self) -> bool:
        """Whether the step changed the weights. Waits for the device."""
        if self.held_back:
            return False
        return self.norm is None or math.isfinite(self.norm)

    def is_known_not_finite(self) -> bool:
        """Return whether the norm is a number, for which nothing has to wait, and not finite."""
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

    To be called before optimizer.step().

    Args:
        norm: of the gradient, from `whole_norm`; None or a number where an engine tells so.

    Returns:
        Whether the step is known to change nothing. Where torch's fused kernels decide on the
        device, it is not known yet, and False.
    """
    has_stepped = Strategy.of(accelerator).zero_stage is not None  # DeepSpeed, in backward
    left_out = has_stepped and accelerator.optimizer_step_was_skipped
    if not isinstance(norm, torch.Tensor):
        return left_out
    inner = optimizer.optimizer
    if inner.defaults.get("fused") and not accelerator.scaler:
        weight = optimizer.param_groups[0]["params"][0]  # on the host if that is offloaded to it
        inner.grad_scale = None
        # The fused kernel leaves out its step where found_inf is 1
        inner.found_inf = (1.0 - norm.isfinite().float()).to(weight.device)
        return left_out
    if math.isfinite(norm):
        return left_out
    optimizer.zero_grad()  # without gradients nothing is stepped
    return True


def whole_norm(grad_norm: Any) -> Any:
    """Return a norm whole: FSDP2 has it as a DTensor. Numbers and None stay as they are."""
    if hasattr(grad_norm, "full_tensor"):
        return grad_norm.full_tensor()
    return grad_norm


class NonFiniteSteps:
    """The steps of a run that were not finite, and the file with their rows.

    Attributes:
        left_out: steps left out so far, by --nonfinite skip.
    """

    def __init__(self, output_dir: str, budget: int) -> None:
        """budget: steps that may be left out; 0 stops at the first."""
        self.left_out = 0
        self._path = Path(output_dir, NONFINITE_ROWS)
        self._budget = budget
        self._unchecked: list[UncheckedStep] = []

    def note(self, step: UncheckedStep) -> None:
        """Remember a step until `check`."""
        self._unchecked.append(step)

    def check(self, accelerator: Accelerator) -> tuple[int, str] | None:
        """Look at the steps since the last call; those not finite changed no weight on any rank.

        Their rows are written down: those whose loss is not finite or, where only the gradient is
        not, all of the step. Every rank takes part.

        Returns:
            None, or the first step at which the run has to end, and why.
        """
        stop = None
        unchecked, self._unchecked = self._unchecked, []
        for step in unchecked:
            if step.is_finite:
                continue
            mine = {"rank": RANK, "all": step.all_rows(), "loss": step.rows_not_finite()}
            ranks = gather_object([mine])
            what = "loss" if any(rank["loss"] for rank in ranks) else "gradient"
            if what == "gradient" and accelerator.mixed_precision == "fp16":
                continue  # the loss scale was too large, as it has to be now and then
            key = "loss" if what == "loss" else "all"
            if accelerator.is_main_process:
                is_first = self.left_out == 0 and stop is None
                self._write(step.step, what, {rank["rank"]: rank[key] for rank in ranks}, is_first)
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
        """Add a line to the file, or begin it anew with the first step of a run."""
        with open(self._path, "w" if is_first else "a") as file:
            file.write(json.dumps({"step": step, "what": what, "rows_by_rank": rows}) + "\n")
