# SPDX-License-Identifier: Apache-2.0
"""How well a causal language model predicts the evaluation text: loss and perplexity."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from core.engine import Layout
from core.loss import LossInHead
from core.run import Run


@torch.no_grad()
def evaluate_perplexity(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    batches: Iterable[Mapping[str, Any]],
    predictor: Any = None,
) -> None:
    """Log the loss, in nats per token trained on, and the perplexity of the evaluation batches.

    With a predictor (extras/predict), the model also answers rows, and the metrics of its answers
    are logged too.

    Args:
        batches: of this rank, as `token_loss` takes them, with the number of tokens that are
            trained on as the first of their `counts`. Every rank has the same number of batches.
    """
    model.eval()
    total = torch.zeros(2, device=layout.device)
    for batch in run.interruptible(batches):
        with layout.part_of(batch, is_training=False) as part:
            total += torch.stack([token_loss(model, part), batch["counts"][0]])
    answered: dict[str, float] = {}
    if predictor is not None:
        token_loss.return_logits()
        answered = predictor.predict(model)
    model.train()
    loss = layout.sum_over_tokens(total[0], is_training=False).item()
    num_trained_on = layout.sum_over_rows(total[1]).item()
    log_perplexity(run, loss / num_trained_on, answered)


def log_perplexity(run: Run, mean: float, answered: Mapping[str, float] | None = None) -> None:
    """Log the loss of an evaluation, in nats per token trained on, and the perplexity.

    Args:
        answered: further metrics, of the answers to held-out rows.
    """
    others = answered or {}
    perplexity = perplexity_of(mean)
    text = f"loss {mean:.4f}, perplexity {perplexity:.2f} per token of held-out text"
    for name, value in others.items():
        text += f", {name.removeprefix('eval_').replace('_', ' ')} {value:.4f}"
    run.log_evaluation({"eval_loss": mean, "eval_perplexity": perplexity, **others}, text)


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a mean loss in nats; a loss above 700 counts as 700.

    A float holds no number above e to the power of 709.
    """
    return math.exp(min(loss, 700))
