"""AdamW, and a schedule that counts the optimizer steps that were applied."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import transformers
from accelerate import Accelerator

from components import upstream
from components.arguments import TrainingArguments


class Schedule:
    """transformers' learning rate schedule, advanced once per applied optimizer step.

    It is not prepared: accelerate would step it once per rank (huggingface/accelerate#2926).

    Attributes:
        learning_rate: the rate of the last optimizer step, or of the first before that.
    """

    def __init__(self, schedule: Any, accelerator: Accelerator) -> None:
        self._schedule = schedule
        self._accelerator = accelerator
        self._held = False
        self.learning_rate: float = schedule.get_last_lr()[0]

    @property
    def steps(self) -> int:
        """How often the schedule was advanced."""
        return self._schedule.state_dict()["last_epoch"]

    def hold(self) -> None:
        """Have the next `step` change nothing, since its optimizer step is left out."""
        self._held = True

    def step(self) -> None:
        """Advance after an optimizer step, unless gradients are accumulated or it was left out."""
        if not self._accelerator.sync_gradients:
            return
        self.learning_rate = self._schedule.get_last_lr()[0]
        left_out = self._held or self._accelerator.optimizer_step_was_skipped
        self._held = False
        if not left_out:
            self._schedule.step()

    def advance(self, steps: int) -> None:
        """Advance to where a resumed run was."""
        for _ in range(steps):
            self._schedule.step()


def make_optimizer(
    model: torch.nn.Module, args: TrainingArguments, accelerator: Accelerator, total_steps: int
) -> tuple[torch.optim.Optimizer, Schedule]:
    """Return AdamW over what is trained, and its schedule. To be called before `prepare`."""
    optimizer = make_adamw(model, args)
    upstream.check_gradients_of_zero0(optimizer, accelerator)
    warmup_steps = int(args.warmup_steps)
    if args.warmup_steps < 1:
        warmup_steps = math.ceil(args.warmup_steps * total_steps)
    schedule = transformers.get_scheduler(
        args.lr_scheduler_type, optimizer, warmup_steps, total_steps
    )
    return optimizer, Schedule(schedule, accelerator)


def make_adamw(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Return AdamW of torch, or of bitsandbytes, over what is trained."""
    groups = parameter_groups(model, args.weight_decay)
    if args.optim.startswith("adamw_torch"):
        fused = args.optim == "adamw_torch_fused"
        return torch.optim.AdamW(groups, lr=args.learning_rate, fused=fused)
    from bitsandbytes import optim

    if args.optim.endswith("8bit"):
        upstream.keep_embeddings_in_32_bits(model)
    # AdamW8bit, PagedAdamW8bit, PagedAdamW32bit
    name = args.optim.replace("paged_", "Paged").replace("adamw_", "AdamW")
    return getattr(optim, name)(groups, lr=args.learning_rate)


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> Sequence[dict[str, Any]]:
    """Return the groups of what is trained: without weight decay on biases and norms."""
    decayed = []
    spared = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_spared = "norm" in name.lower() or ".ln_" in name or name.endswith("bias")
        (spared if is_spared else decayed).append(weight)
    groups = [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    # DeepSpeed drops an empty group, for which the schedule then has a rate too many
    return [group for group in groups if group["params"]]
