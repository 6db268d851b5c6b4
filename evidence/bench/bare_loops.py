# SPDX-License-Identifier: Apache-2.0
"""Two bare loops of plain PyTorch.

Both read batches that were prepared in advance and do nothing but compute: no accelerate, no data
loader, no logging.
"""

import argparse
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .peers import load_model, write_metrics
from .recipe import Batch

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[[Any, Batch], "Tensor"]


def run_floor(args: argparse.Namespace) -> None:
    """Train as most loops do: padded batches, and the logits of all tokens."""
    run_bare(args, usual_loss, "padded.pt")


def run_lean(args: argparse.Namespace) -> None:
    """Train on the recipe's own batches, with the logits of supervised tokens only.

    They are computed all at once, whereas the recipe may compute them in pieces. The time that the
    recipe takes beyond this loop is its overhead.
    """
    run_bare(args, lean_loss, "own.pt")


def run_bare(args: argparse.Namespace, loss_of: Loss, file: str) -> None:
    """Train on the batches of a file in args.data.

    loss_of: returns the summed cross-entropy of a batch's supervised tokens. Raises ValueError if
    there are fewer batches than the steps need.
    """
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    loaded = torch.load(args.data / file, weights_only=True)
    batches = [to_device(batch, device) for batch in loaded]
    model = model_on(device, args)
    accumulation = args.gradient_accumulation_steps
    steps = args.max_steps if args.max_steps > 0 else math.ceil(len(batches) / accumulation)
    needed = steps * accumulation
    if len(batches) < needed:
        raise ValueError(f"{args.data / file} has {len(batches)} batches, {needed} are needed")

    groups = weight_groups(model, args.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    bf16 = args.mixed_precision == "bf16"
    most_norm = args.max_grad_norm or math.inf  # 0: gradients are not clipped
    model.train()
    losses = []
    tokens = []
    for step in range(steps):
        window = batches[step * accumulation : (step + 1) * accumulation]
        counts = torch.stack([batch["counts"] for batch in window])
        num_supervised, num_tokens = counts.sum(0)
        total = 0.0
        for batch in window:
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                loss = loss_of(model, batch) / num_supervised
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(weights, most_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        tokens.append(num_tokens)
        losses.append(total)

    if not args.skip_save:
        model.save_pretrained(args.output_dir)
    by_step = {step: float(loss) for step, loss in enumerate(losses, 1)}
    write_metrics(args.output_dir, [int(count) for count in tokens], by_step)


def model_on(device: str, args: argparse.Namespace) -> Any:
    """Return the model on a device, with gradient checkpointing if it is requested."""
    model = load_model(args)
    if not args.load_in_4bit:  # A quantized model is already on the device.
        model = model.to(device)
    if args.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def to_device(batch: Batch, device: str) -> Batch:
    """Return a batch with its tensors, and those one level below, on a device."""
    moved = {}
    for name, value in batch.items():
        moved[name] = to_device(value, device) if isinstance(value, dict) else value.to(device)
    return moved


def weight_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return the weights that are trained, in two groups: biases and norms do not decay."""
    decaying = []
    others = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if "norm" in name or ".ln_" in name or name.endswith("bias"):
            others.append(weight)
        else:
            decaying.append(weight)
    groups = [
        {"params": decaying, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def usual_loss(model: Any, batch: Batch) -> "Tensor":
    """Return the cross-entropy summed over a batch's supervised tokens.

    This is a separate function so that the logits are freed when it returns.
    """
    from torch.nn.functional import cross_entropy, pad

    logits = model(**batch["inputs"], use_cache=False).logits.flatten(0, 1).float()
    # Labels are shifted by one token, since shifting logits would copy them.
    targets = pad(batch["labels"], (0, 1), value=-100)[:, 1:].flatten()
    return cross_entropy(logits, targets, ignore_index=-100, reduction="sum")


def lean_loss(model: Any, batch: Batch) -> "Tensor":
    """Return the same as `usual_loss`, with the logits of supervised tokens only."""
    from torch.nn.functional import cross_entropy

    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    hidden = inner.base_model(**batch["inputs"], use_cache=False).last_hidden_state.flatten(0, 1)
    logits = inner.lm_head(hidden[batch["positions"]]).float()
    return cross_entropy(logits, batch["targets"], reduction="sum")
