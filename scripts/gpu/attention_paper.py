"""The FlashAttention paper's figures (arXiv 2205.14135, and the README of
Dao-AILab/flash-attention) measured again.

Attention alone, forward and backward, causal, at head size 64: the standard implementation, which
builds the matrix of scores, against torch's flash kernel through scaled_dot_product_attention. The
README states 10 times less memory at 2,048 tokens and 20 times at 4,096, and 2 to 4 times the
speed.
"""

import torch

from .cell import Outcome
from .timing import milliseconds, peak_mib

STATED = {2048: 10, 4096: 20}  # length: times less memory
LEAST_SPEED = 2.0
HEADS, WIDTH, TOKENS = 16, 64, 16384  # as in the paper's benchmark: batch x length stays


def standard(query, key, value, mask):
    """softmax(q k^T / sqrt(d)) v with the matrix of scores in memory."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    scores = scores.masked_fill(mask, float("-inf"))
    return torch.softmax(scores, -1) @ value


def flash(query, key, value, mask):
    """torch's FlashAttention kernel and no other; on a CPU whatever torch has."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    if query.device.type == "cpu":
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query, key, value, is_causal=True)


def measure(setup, attention, length):
    """(milliseconds, MiB above inputs) of one forward and backward pass."""
    tokens = TOKENS if not setup.tiny else 512
    dtype = torch.float16 if setup.device == "cuda" else torch.float32
    shape = (max(tokens // length, 1), HEADS if not setup.tiny else 2, length, WIDTH)
    inputs = [
        torch.randn(shape, device=setup.device, dtype=dtype, requires_grad=True) for _ in range(3)
    ]
    at = torch.arange(length, device=setup.device)
    mask = at[:, None] < at
    gradient = torch.randn_like(inputs[0])

    def step():
        for tensor in inputs:
            tensor.grad = None
        attention(*inputs, mask).backward(gradient)

    ms = milliseconds(step, setup.device, repeats=10)
    return ms, peak_mib(step, setup.device)


def paper_figures(setup):
    """Memory and speed of standard attention against the flash kernel at several lengths."""
    lengths = (512, 1024, 2048, 4096) if not setup.tiny else (64, 128)
    outcome = Outcome(ok=True)
    for length in lengths:
        slow, large = measure(setup, standard, length)
        fast, small = measure(setup, flash, length)
        row = {
            "tokens": length,
            "standard, ms": round(slow, 3),
            "flash, ms": round(fast, 3),
            "times faster": round(slow / fast, 2),
        }
        if large is not None:
            row |= {
                "standard, MiB": round(large, 1),
                "flash, MiB": round(small, 1),
                "times less memory": round(large / small, 1),
            }
            if length in STATED:
                row["stated"] = STATED[length]
                outcome.ok = (
                    outcome.ok and large / small >= STATED[length] and slow / fast >= LEAST_SPEED
                )
        outcome.rows.append(row)
        setup.keep(outcome)
    return outcome
