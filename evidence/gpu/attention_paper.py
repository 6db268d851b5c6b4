# SPDX-License-Identifier: Apache-2.0
"""The FlashAttention paper's figures, measured again.

They are in arXiv 2205.14135 and in the README of Dao-AILab/flash-attention. Attention is measured
without the rest of a model, forward and backward, causal, at head size 64. The standard
implementation, which builds the matrix of scores, is compared with torch's flash kernel through
scaled_dot_product_attention. The README states 10 times less memory at 2,048 tokens and 20 times at
4,096, and 2 to 4 times the speed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .cell import Outcome, Row, Setup
from .timing import milliseconds, peak_mib

STATED = {2048: 10, 4096: 20}  # {length: how many times less memory the flash kernel takes}
LEAST_SPEED = 2.0  # times as fast as the standard implementation
WIDTH = 64  # features of a head

Attention = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """What is computed: batch x length stays `tokens`, as in the paper's benchmark."""

    heads: int
    tokens: int
    lengths: tuple[int, ...]


PAPER = Shape(heads=16, tokens=16384, lengths=(512, 1024, 2048, 4096))
TINY = Shape(heads=2, tokens=512, lengths=(64, 128))


@dataclass(frozen=True)
class Cost:
    """What one forward and backward pass takes."""

    ms: float
    mib: float | None  # memory on top of the inputs; None on a CPU


def standard(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v with the matrix of scores in memory.

    query, key, value: [batch, heads, length, width]. mask: [length, length], True where a position
    is not seen.
    """
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1) @ value


def flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute the same with torch's FlashAttention kernel; on a CPU with its default kernel."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if query.device.type == "cpu":
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def measure(setup: Setup, attention: Attention, shape: Shape, length: int) -> Cost:
    """Return the cost of attention over rows of one length."""
    dtype = torch.float16 if setup.on_gpu else torch.float32
    size = (max(shape.tokens // length, 1), shape.heads, length, WIDTH)
    options = {"device": setup.device, "dtype": dtype, "requires_grad": True}
    query, key, value = (torch.randn(size, **options) for _ in range(3))
    places = torch.arange(length, device=setup.device)
    mask = places[:, None] < places
    gradient = torch.randn_like(query)

    def step() -> None:
        for tensor in (query, key, value):
            tensor.grad = None
        attention(query, key, value, mask).backward(gradient)

    ms = milliseconds(step, setup.device, repeats=10)
    return Cost(ms, peak_mib(step, setup.device))


def paper_figures(setup: Setup) -> Outcome:
    """Measure standard attention against the flash kernel at several lengths."""
    shape = TINY if setup.tiny else PAPER
    outcome = Outcome(ok=True)
    for length in shape.lengths:
        slow = measure(setup, standard, shape, length)
        fast = measure(setup, flash, shape, length)
        outcome.rows.append(row_of(length, slow, fast))
        if slow.mib is not None and fast.mib is not None and length in STATED:
            is_small = slow.mib / fast.mib >= STATED[length]
            outcome.require(is_small and slow.ms / fast.ms >= LEAST_SPEED)
        setup.keep(outcome)
    return outcome


def row_of(length: int, slow: Cost, fast: Cost) -> Row:
    """Return both costs at one length, their ratios, and the stated ratio."""
    row = {
        "tokens": length,
        "standard, ms": round(slow.ms, 3),
        "flash, ms": round(fast.ms, 3),
        "times faster": round(slow.ms / fast.ms, 2),
    }
    if slow.mib is None or fast.mib is None:
        return row
    row["standard, MiB"] = round(slow.mib, 1)
    row["flash, MiB"] = round(fast.mib, 1)
    row["times less memory"] = round(slow.mib / fast.mib, 1)
    if length in STATED:
        row["stated"] = STATED[length]
    return row
