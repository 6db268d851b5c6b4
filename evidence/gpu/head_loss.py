# SPDX-License-Identifier: Apache-2.0
"""The recipe's loss in pieces preserves the gradient of the output head."""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor

from bench import recipe

from .cell import Outcome, Setup
from .timing import milliseconds

# Relative error of the head's gradient against fp32; one bf16 rounding is 3e-3
GRADIENT_BOUND = 5e-3


@dataclass(frozen=True)
class Shape:
    """A head, and the tokens that it is applied to."""

    vocabulary: int
    width: int
    tokens: int


LARGE = Shape(vocabulary=128256, width=4096, tokens=8192)
TINY = Shape(vocabulary=512, width=64, tokens=256)


@dataclass(frozen=True)
class Case:
    """In how many pieces the loss is computed, and in which precision."""

    pieces: int
    autocast: bool  # bf16 instead of fp32


# The first case is the one that the others are compared with.
CASES = (Case(1, False), Case(1, True), Case(4, True), Case(16, True))


class HeadOnly(torch.nn.Module):
    """The smallest model that the recipe's loss accepts: a head, and nothing before it."""

    def __init__(self, head: torch.nn.Linear, vocabulary: int) -> None:
        super().__init__()
        self.base_model = torch.nn.Identity()
        self.lm_head = head
        self.embedding = SimpleNamespace(num_embeddings=vocabulary)

    def forward(self, input_ids: Tensor | None = None) -> SimpleNamespace:
        """Return the logits of the base model's output."""
        hidden = self.base_model(input_ids).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))

    def get_output_embeddings(self) -> torch.nn.Linear:
        """Return the head."""
        return self.lm_head

    def get_input_embeddings(self) -> SimpleNamespace:
        """Return an object with the size of the vocabulary."""
        return self.embedding


def head_in_pieces(setup: Setup) -> Outcome:
    """Compare the head's gradient with that of fp32 in one piece, and measure the time."""
    shape = TINY if setup.tiny else LARGE
    hidden = torch.randn(1, shape.tokens, shape.width, device=setup.device) / 8
    targets = torch.randint(shape.vocabulary, (shape.tokens,), device=setup.device)
    outcome = Outcome(ok=True)
    reference = None
    for case in CASES:
        head = head_with_loss(shape, targets, case.pieces)
        leaf = hidden.clone().requires_grad_()
        step = partial(head_step, head, leaf, case.autocast)
        ms = None
        if case.autocast:
            ms = milliseconds(step, setup.device, repeats=3, warmup=1)
        else:
            step()
        if head.weight.grad is None:
            raise RuntimeError("the loss gave the head no gradient")
        gradient = head.weight.grad.float()
        if reference is None:
            reference = gradient.clone()
        error = distance(gradient, reference)
        row = {
            "pieces": case.pieces,
            "precision": "bf16" if case.autocast else "fp32",
            "ms": ms,
            "error of the head's gradient": error,
        }
        outcome.rows.append(row)
        outcome.require(error <= GRADIENT_BOUND)
        setup.keep(outcome)
        del step, head, leaf, gradient  # Free their memory before the next case.
        if setup.on_gpu:
            torch.cuda.empty_cache()
    return outcome


def head_with_loss(shape: Shape, targets: Tensor, pieces: int) -> torch.nn.Linear:
    """Return a head whose forward pass is the recipe's loss in a number of pieces."""
    device = targets.device
    torch.manual_seed(0)
    head = torch.nn.Linear(shape.width, shape.vocabulary, bias=False, device=device)
    torch.nn.init.normal_(head.weight, std=0.02)
    logits_mib = shape.tokens * shape.vocabulary * 4 / 2**20
    positions = torch.arange(shape.tokens, device=device)
    model = HeadOnly(head, shape.vocabulary)
    recipe.put_loss_in_head(model, logits_mib / pieces).request_losses(positions, targets)
    return head


def head_step(head: torch.nn.Linear, hidden: Tensor, autocast: bool) -> None:
    """Do one forward and backward pass through the head, with a fresh gradient.

    hidden: [1, tokens, width].
    """
    head.weight.grad = None
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=autocast):
        loss = head.forward(hidden).sum()
    (loss / hidden.shape[1]).backward()


def distance(tensor: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference of two tensors, relative to the reference's."""
    return ((tensor - reference).norm() / reference.norm()).item()
