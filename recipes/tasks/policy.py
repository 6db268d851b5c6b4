# SPDX-License-Identifier: Apache-2.0
"""The loss of a policy on answers that it has sampled, as TRL's GRPOTrainer computes it."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from core.loss import LossInHead
from tasks.distillation import FrozenModel
from tasks.pairs import adapters_disabled

# What `policy_losses` tells of each token, under TRL's names
LOGGED = ["kl", "clip_ratio/low_mean", "clip_ratio/high_mean"]


# ---- Log-probabilities ----
class LogpsInHead(LossInHead):
    """Log-probabilities of answers under the distribution that they are sampled from."""

    def __init__(self, model: Any, args: Any, device: torch.device) -> None:
        """Replace the forward pass of the model's output head, as LossInHead does."""
        super().__init__(model, args.max_logits_mib, device)
        self._losses_of = partial(logps_and_entropies, temperature=args.temperature)
        self._evaluated_losses_of = self._losses_of

    def of_answers(
        self, model: torch.nn.Module, batch: Mapping[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies in nats, [answers, tokens], 0 behind an answer."""
        found, _ = self.losses(model, batch)
        return unflatten(found, batch["is_token"])

    @torch.no_grad()
    def before_training(
        self, model: torch.nn.Module, frozen: FrozenModel | None, batch: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return log-probabilities before training, [answers, tokens].

        Args:
            model: runs without its adapters if there is no frozen model.
            frozen: the model as it was before training.
        """
        if frozen is None:
            with adapters_disabled():
                logps, _ = self.of_answers(model, batch)
            return logps
        found = []
        hidden = frozen.hidden_states(batch).split(self._piece)
        for states, targets in zip(hidden, batch["targets"].split(self._piece), strict=True):
            found.append(self._losses_of(frozen.logits(states), targets))
        logps, _ = unflatten(torch.cat(found), batch["is_token"])
        return logps


def logps_and_entropies(
    logits: torch.Tensor, targets: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return the log-probability of each target, and the entropy at its place, [tokens, 2].

    Logits are [tokens, vocabulary]. Only the former have a gradient.
    """
    logps = (logits.float() / temperature).log_softmax(-1)
    of_targets = logps.gather(-1, targets[:, None]).squeeze(-1)
    with torch.no_grad():
        entropies = -(logps.exp() * logps).sum(-1)
    return torch.stack([of_targets, entropies], dim=-1)


def unflatten(found: torch.Tensor, is_token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the two columns of [tokens, 2] as [answers, tokens of the longest], 0 elsewhere."""
    zeros = torch.zeros(is_token.shape, device=found.device)
    logps, entropies = found.unbind(-1)
    return zeros.masked_scatter(is_token, logps), zeros.masked_scatter(is_token, entropies)


# ---- Loss ----
def policy_losses(
    logps: torch.Tensor, old: torch.Tensor, batch: Mapping[str, Any], args: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of each token, and what is logged of it, as TRL's GRPOTrainer has them.

    Args:
        logps, old: log-probabilities now, and when the answers were sampled, [answers, tokens].
        batch: with advantages, [answers]; mask, [answers, tokens]; and, with --beta, reference,
            log-probabilities before training, [answers, tokens].

    Returns:
        [answers, tokens], and LOGGED, [3, answers, tokens]: the KL, and 1 where a ratio is clipped.
    """
    advantages = batch["advantages"][:, None]
    mask = batch["mask"]
    log_ratio = logps - old
    if args.importance_sampling_level == "sequence":
        log_ratio = mean_of_answers(log_ratio, mask)[:, None]
    ratio = log_ratio.exp()
    most = args.epsilon if args.epsilon_high is None else args.epsilon_high
    clipped = ratio.clamp(1 - args.epsilon, 1 + most)
    losses = -torch.minimum(ratio * advantages, clipped * advantages)
    kl = torch.zeros_like(logps)
    if args.beta:
        gap = batch["reference"] - logps
        # An estimate that is never negative (k3), weighted by the ratio, through which it has a
        # gradient too: the answers are from the policy before its latest steps
        kl = (gap.exp() - gap - 1) * ratio
        losses = losses + args.beta * kl
    is_low = (ratio < clipped) & (advantages < 0)
    is_high = (ratio > clipped) & (advantages > 0)
    logged = [kl.detach(), is_low.expand_as(logps), is_high.expand_as(logps)]
    return losses.expand_as(logps), torch.stack(logged)


def mean_of_answers(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean over the tokens of each answer in the mask, [answers]; 0 without any."""
    return (values * mask).sum(1) / mask.sum(1).clamp(min=1)


def sum_of_losses(
    losses: torch.Tensor,
    mask: torch.Tensor,
    num_answers: torch.Tensor,
    num_tokens: torch.Tensor,
    args: Any,
) -> torch.Tensor:
    """Return a micro-batch's part of the loss, a sum that is divided by a count of the whole step.

    Args:
        losses, mask: [answers, tokens].
        num_answers, num_tokens: of the step, on all ranks; tokens that are trained on.
    """
    if args.loss_type == "grpo":  # arXiv 2402.03300
        return mean_of_answers(losses, mask).sum() / num_answers
    total = (losses * mask).sum()
    if args.loss_type == "dr_grpo":  # arXiv 2503.20783
        return total / (num_answers * args.max_completion_length)
    return total / num_tokens.clamp(min=1)  # arXiv 2503.14476
