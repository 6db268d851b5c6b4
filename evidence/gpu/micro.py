# SPDX-License-Identifier: Apache-2.0
"""Cells of a second or two, each about a property of a library that the recipes rely on."""

from typing import Any

import torch

from bench import machine

from .cell import Outcome, Setup
from .timing import milliseconds, synchronize

CONTEXT_ASSUMED_MIB = 819  # CONTEXT of the planner's cards


def pinned_answer(setup: Setup) -> Outcome:
    """Check that a non-blocking copy to the host is in pinned memory, as the recipes assume."""
    answer = torch.ones((), device=setup.device)
    pinned = answer.to("cpu", non_blocking=True).is_pinned()
    return Outcome([{"the copy is in pinned memory": pinned}], pinned)


def found_inf(setup: Setup) -> Outcome:
    """Check that fused AdamW skips a step if found_inf is 1, and takes and counts it if it is 0."""
    weight = torch.nn.Parameter(torch.ones(8, device=setup.device))
    # The fused kernel reads two attributes that the class does not declare.
    optimizer: Any = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.grad_scale = None
    optimizer.found_inf = torch.ones((), device=setup.device)
    optimizer.step()
    left_out = bool((weight == 1).all())
    optimizer.found_inf = torch.zeros((), device=setup.device)
    optimizer.step()
    stepped = bool((weight != 1).any())
    counted = optimizer.state[weight]["step"].item()
    row = {"left out": left_out, "then stepped": stepped, "steps counted": counted}
    return Outcome([row], left_out and stepped and counted == 1)


def context_size(setup: Setup) -> Outcome:
    """Compare the memory that a process takes besides its tensors with the planner's assumption.

    It is CUDA's context and the kernels that are loaded into it.
    """
    before = machine.gpu_memory_used() or 0
    matrix = torch.randn(256, 256, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.softmax(matrix @ matrix, -1).sum().backward()
    synchronize(setup.device)
    after = machine.gpu_memory_used() or 0
    context = after - before - torch.cuda.memory_reserved() / 2**20
    row = {"context, MiB": context, "assumed by the planner, MiB": CONTEXT_ASSUMED_MIB}
    return Outcome([row], context <= CONTEXT_ASSUMED_MIB)


def int8_rows(setup: Setup) -> Outcome:
    """Measure how much the int8 product of a row depends on its neighbors, and its time."""
    width = 128 if setup.tiny else 4096
    rows = 8 if setup.tiny else 64
    dtype = torch.bfloat16 if setup.on_gpu else torch.float32
    layer = int8_layer(width).to(setup.device)
    hidden = torch.randn(1, rows, width, device=setup.device)
    hidden = hidden.clamp(-5, 5).to(dtype)
    hidden[0, -1, 3] = 9.0  # above the threshold: the column is an outlier for all rows
    with torch.no_grad():
        beside_outlier = layer(hidden)[:, :-1]
        without_outlier = layer(hidden[:, :-1])
        difference = (beside_outlier - without_outlier).abs().max().item()
        ms = milliseconds(lambda: layer(hidden), setup.device)
    row = {
        "difference of a row with and without an outlier beside it": difference,
        f"ms per product of {rows} rows": ms,
    }
    return Outcome([row])


def int8_layer(width: int) -> torch.nn.Module:
    """Return a square layer of random int8 weights, as in a base of LoRA."""
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    layer = Linear8bitLt(width, width, bias=False, has_fp16_weights=False, threshold=6.0)
    weights = (torch.randn(width, width) * 0.02).half()
    # pyrefly: ignore[unexpected-keyword]  # Int8Params takes its arguments in __new__
    layer.weight = Int8Params(weights, requires_grad=False, has_fp16_weights=False)
    return layer
