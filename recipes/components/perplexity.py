# SPDX-License-Identifier: Apache-2.0
"""How well a causal language model predicts the evaluation text: loss and perplexity."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate import Accelerator

from components.head_loss import LossInHead
from components.run import Run


@torch.no_grad()
def evaluate_perplexity(
    run: Run,
    accelerator: Accelerator,
    model: torch.nn.Module,
    token_loss: LossInHead,
    batches: Iterable[Mapping[str, Any]],
) -> None:
    """Log the loss, in nats per token trained on, and the perplexity of the evaluation batches.

    Args:
        batches: of this rank, as `token_loss` takes them, with the number of tokens that are
            trained on as the first of their `counts`. Every rank has the same number of batches.
    """
    model.eval()
    total = torch.zeros(2, device=accelerator.device)
    for batch in run.interruptible(batches):
        total += torch.stack([token_loss(model, batch), batch["counts"][0]])
    model.train()
    loss, num_trained_on = accelerator.reduce(total).tolist()
    mean = loss / num_trained_on
    perplexity = perplexity_of(mean)
    run.log_evaluation(
        {"eval_loss": mean, "eval_perplexity": perplexity},
        f"loss {mean:.4f}, perplexity {perplexity:.2f} per token of held-out text",
    )


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; a loss above 700 counts as 700.

    A float holds no number above e to the power of 709.
    """
    return math.exp(min(loss, 700))
