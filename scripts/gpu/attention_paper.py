"""The FlashAttention paper's figures, measured again.

They are in arXiv 2205.14135 and in the README of Dao-AILab/flash-attention. Measured is attention
alone, forward and backward, causal, at head size 64: the standard implementation, which builds the
matrix of scores, against torch's flash kernel through scaled_dot_product_attention. The README
states 10 times less memory at 2,048 tokens and 20 times at 4,096, and 2 to 4 times the speed.
"""

from dataclasses import dataclass

import torch

from .cell import Outcome
from .timing import milliseconds, peak_mib

STATED = {2048: 10, 4096: 20}  # length: times less memory
LEAST_SPEED = 2.0  # times as fast as the standard implementation
WIDTH = 64  # of a head


@dataclass(frozen=True)
class Shape:
    """What is computed: batch x length stays `tokens`, as in the paper's benchmark."""

    heads: int
    tokens: int
    lengths: tuple


PAPER = Shape(heads=16, tokens=16384, lengths=(512, 1024, 2048, 4096))
TINY = Shape(heads=2, tokens=512, lengths=(64, 128))


def standard(query, key, value, mask):
    """Compute softmax(q k^T / sqrt(d)) v with the matrix of scores in memory.

    query, key, value: [batch, heads, length, width]. mask: [length, length], True where a position
    is not seen.
    """
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1) @ value


def flash(query, key, value, mask):
    """Compute the same by torch's FlashAttention kernel; on a CPU by whatever torch has."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if query.device.type == "cpu":
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def measure(setup, attention, shape, length):
    """Return (milliseconds, MiB above the inputs or None) of one forward and backward pass."""
    dtype = torch.float16 if setup.device == "cuda" else torch.float32
    size = (max(shape.tokens // length, 1), shape.heads, length, WIDTH)
    inputs = []
    for _ in range(3):  # query, key and value
        inputs.append(torch.randn(size, device=setup.device, dtype=dtype, requires_grad=True))
    places = torch.arange(length, device=setup.device)
    mask = places[:, None] < places
    gradient = torch.randn_like(inputs[0])

    def step():
        for tensor in inputs:
            tensor.grad = None
        attention(*inputs, mask).backward(gradient)

    ms = milliseconds(step, setup.device, repeats=10)
    return ms, peak_mib(step, setup.device)


def paper_figures(setup):
    """Measure standard attention against the flash kernel at several lengths."""
    shape = TINY if setup.tiny else PAPER
    outcome = Outcome(ok=True)
    for length in shape.lengths:
        standard_ms, standard_mib = measure(setup, standard, shape, length)
        flash_ms, flash_mib = measure(setup, flash, shape, length)
        speedup = standard_ms / flash_ms
        row = {
            "tokens": length,
            "standard, ms": round(standard_ms, 3),
            "flash, ms": round(flash_ms, 3),
            "times faster": round(speedup, 2),
        }
        if standard_mib is not None:
            saving = standard_mib / flash_mib
            row["standard, MiB"] = round(standard_mib, 1)
            row["flash, MiB"] = round(flash_mib, 1)
            row["times less memory"] = round(saving, 1)
            if length in STATED:
                row["stated"] = STATED[length]
                holds = saving >= STATED[length] and speedup >= LEAST_SPEED
                outcome.ok = outcome.ok and holds
        outcome.rows.append(row)
        setup.keep(outcome)
    return outcome
