# SPDX-License-Identifier: Apache-2.0
"""AdamW, and a schedule that stays at steps known to be left out."""

import inspect
import math
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from components.arguments import TrainingArguments
from core import workarounds

# The optimizers of bitsandbytes by --optim
BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
}
# Parameters of transformers' functions of schedules that the recipes give themselves
NOT_SETTINGS = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")


class Schedule:
    """transformers' schedule of the learning rate, which stays at steps known to be left out.

    Where torch's fused kernel leaves out a step that is not finite, on the device, the host does
    not know it yet, and the schedule counts that step. To correct it later would let the rates
    depend on how often the host looks, that is on --logging_steps and on when a run is stopped.

    It is not prepared: accelerate would step it once per rank (huggingface/accelerate#2926).

    Attributes:
        learning_rate: that of the latest optimizer step, applied or not; before any, of the first.
    """

    def __init__(
        self, schedule: torch.optim.lr_scheduler.LRScheduler, accelerator: Accelerator
    ) -> None:
        self._schedule = schedule
        self._accelerator = accelerator
        self._is_held = False
        self.learning_rate = self.get_last_lr()[0]

    @property
    def steps(self) -> int:
        """The number of steps that the schedule has taken."""
        return self._schedule.last_epoch

    def get_last_lr(self) -> list[Any]:
        """Return the rate of each parameter group for the next optimizer step."""
        return self._schedule.get_last_lr()

    def hold(self) -> None:
        """Do not advance at the next optimizer step, which is left out."""
        self._is_held = True

    def step(self) -> None:
        """Advance by one step. Call it after each optimizer.step().

        The schedule stays where it is while gradients are accumulated, and if the step is known to
        have been left out: because of fp16's loss scale, by DeepSpeed, or after `hold`.
        """
        if not self._accelerator.sync_gradients:
            return
        self.learning_rate = self.get_last_lr()[0]
        was_held = self._is_held
        self._is_held = False
        if not was_held and not self._accelerator.optimizer_step_was_skipped:
            self._schedule.step()

    def advance(self, steps: int) -> None:
        """Take a number of steps at once, when a run resumes."""
        for _ in range(steps):
            self._schedule.step()
        self.learning_rate = self.get_last_lr()[0]


def make_optimizer(
    model: torch.nn.Module, args: TrainingArguments, accelerator: Accelerator, total_steps: int
) -> tuple[torch.optim.Optimizer, Schedule]:
    """Return AdamW over what is trained, and its schedule.

    Call it before `prepare`, which takes the optimizer but not the schedule. Biases and norms get
    no weight decay.

    Args:
        total_steps: the number of optimizer steps of the whole run.
    """
    optimizer = make_adamw(model, args)
    workarounds.check_gradients_of_zero0(optimizer, accelerator)
    schedule = transformers.get_scheduler(
        args.lr_scheduler_type,
        optimizer,
        warmup_steps(args, total_steps),
        total_steps,
        args.lr_scheduler_kwargs,
    )
    return optimizer, Schedule(schedule, accelerator)


def warmup_steps(args: TrainingArguments, total_steps: int) -> int:
    """Return the number of warmup steps; --warmup_steps below 1 is a share of all steps."""
    if args.warmup_steps < 1:
        return math.ceil(args.warmup_steps * total_steps)
    return int(args.warmup_steps)


def make_adamw(model: torch.nn.Module, args: TrainingArguments) -> torch.optim.Optimizer:
    """Return AdamW of torch or bitsandbytes over what is trained."""
    groups = parameter_groups(model, args.weight_decay)
    settings: dict[str, Any] = {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
    }
    if args.optim not in BITSANDBYTES:
        is_fused = args.optim == "adamw_torch_fused"
        return torch.optim.AdamW(groups, fused=is_fused, **settings)
    import bitsandbytes

    if args.optim.endswith("8bit"):
        workarounds.keep_embeddings_in_32_bits(model)
    kind = getattr(bitsandbytes.optim, BITSANDBYTES[args.optim])
    return kind(groups, **settings)


def find_schedule_problem(args: TrainingArguments) -> str | None:
    """Return why transformers cannot make the requested schedule, or None if it can."""
    settings = args.lr_scheduler_kwargs or {}
    name = args.lr_scheduler_type
    if settings:
        takes = settings_of_schedule(name)
        unknown = sorted(settings.keys() - takes)
        if unknown:
            known = f"it takes {', '.join(takes)}" if takes else "it takes none"
            return f"--lr_scheduler_kwargs: {name} has no setting {', '.join(unknown)}: {known}"
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            return f"--lr_scheduler_kwargs: {key} {value!r}: must be a number, 0 or more"
    if name != "cosine_with_min_lr":
        return None
    given = [key for key in ("min_lr", "min_lr_rate") if key in settings]
    if len(given) != 1:
        return (
            "--lr_scheduler_type cosine_with_min_lr needs one of min_lr and min_lr_rate: pass "
            "--lr_scheduler_kwargs '{\"min_lr_rate\": 0.1}' to end at a tenth of the peak"
        )
    largest = args.learning_rate if given == ["min_lr"] else 1
    if settings[given[0]] > largest:
        return f"--lr_scheduler_kwargs: {given[0]} {settings[given[0]]}: must be at most {largest}"
    return None


def settings_of_schedule(name: str) -> list[str]:
    """Return the names of the settings that --lr_scheduler_kwargs may have for a schedule."""
    # Imports peft, which takes up to a second that a plan of the memory does not need
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION

    function = TYPE_TO_SCHEDULER_FUNCTION[transformers.SchedulerType(name)]
    return [key for key in inspect.signature(function).parameters if key not in NOT_SETTINGS]


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return what is trained in groups: with weight decay, and biases and norms without.

    Weights of different meshes are apart, those that no mesh splits among them: no kernel updates
    tensors of several meshes at once.
    """
    groups: dict[Any, dict] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_kept = is_bias_or_norm(name)
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        empty = {"params": [], "weight_decay": 0.0 if is_kept else weight_decay}
        groups.setdefault((is_kept, mesh), empty)["params"].append(weight)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def is_bias_or_norm(name: str) -> bool:
    """Return whether a parameter's name is that of a bias or of a norm's weight."""
    return "norm" in name.lower() or ".ln_" in name or name.endswith("bias")
