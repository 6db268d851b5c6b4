# SPDX-License-Identifier: Apache-2.0
"""The optimizer and its schedule, and noise on the embeddings."""

import math
from functools import partial
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from core import workarounds

# The optimizers of bitsandbytes by --optim
BITSANDBYTES = {
    "adamw_8bit": "AdamW8bit",
    "paged_adamw_8bit": "PagedAdamW8bit",
    "paged_adamw_32bit": "PagedAdamW32bit",
}


# ---- Noise ----
def add_neftune(model: Any, alpha: float | None) -> None:
    """Have the model add NEFTune's noise to its embeddings while it trains; None adds none.

    The noise comes from the generator that Run seeds for each step, as that of dropout does, so
    that a resumed run draws the same.
    """
    if alpha is not None:
        model.get_input_embeddings().register_forward_hook(partial(add_noise, alpha=alpha))


def add_noise(
    module: torch.nn.Module, inputs: Any, output: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Return embeddings plus uniform noise of at most alpha / sqrt(tokens * features).

    In evaluation they stay as they are (arXiv 2310.05914).

    Args:
        output: of the embedding, [rows, tokens, features].
    """
    if not module.training:
        return output
    tokens, features = output.shape[-2:]
    largest = alpha / math.sqrt(tokens * features)
    return output + torch.empty_like(output).uniform_(-largest, largest)


# ---- Optimizer and schedule ----
class Schedule:
    """transformers' schedule of the learning rate, which stays at steps known to be left out.

    core/README.md says which are known. It is not prepared: accelerate would step it once per rank
    (huggingface/accelerate#2926).

    Attributes:
        learning_rate: that of the latest optimizer step, applied or not; before any, of the first.
    """

    def __init__(
        self, schedule: torch.optim.lr_scheduler.LRScheduler, accelerator: Accelerator
    ) -> None:
        self._schedule = schedule
        self._accelerator = accelerator
        self._is_held = False
        self.learning_rate: Any = schedule.get_last_lr()[0]

    @property
    def steps(self) -> int:
        """The number of steps that the schedule has taken."""
        return self._schedule.last_epoch

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
        self.learning_rate = self._schedule.get_last_lr()[0]
        was_held = self._is_held
        self._is_held = False
        if not was_held and not self._accelerator.optimizer_step_was_skipped:
            self._schedule.step()

    def advance(self, steps: int) -> None:
        """Take a number of steps at once, when a run resumes."""
        for _ in range(steps):
            self._schedule.step()
        self.learning_rate = self._schedule.get_last_lr()[0]


def make_optimizer(
    model: torch.nn.Module, args: Any, accelerator: Accelerator, total_steps: int
) -> tuple[torch.optim.Optimizer, Schedule]:
    """Return AdamW over what is trained, and the schedule of its learning rate.

    Call it before `prepare`, which takes the optimizer but not the schedule.

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


def make_adamw(model: torch.nn.Module, args: Any) -> torch.optim.Optimizer:
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


def parameter_groups(model: torch.nn.Module, weight_decay: float) -> list[dict]:
    """Return what is trained in groups: with weight decay, and biases and norms without.

    Weights of different meshes are apart, those that no mesh splits among them: no kernel updates
    tensors of several meshes at once.
    """
    groups: dict[Any, dict] = {}
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        is_kept = "norm" in name.lower() or ".ln_" in name or name.endswith("bias")
        mesh = weight.device_mesh if isinstance(weight, DTensor) else None
        empty = {"params": [], "weight_decay": 0.0 if is_kept else weight_decay}
        groups.setdefault((is_kept, mesh), empty)["params"].append(weight)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def warmup_steps(args: Any, total_steps: int) -> int:
    """Return the number of warmup steps; --warmup_steps below 1 is a share of all steps."""
    if args.warmup_steps < 1:
        return math.ceil(args.warmup_steps * total_steps)
    return int(args.warmup_steps)
