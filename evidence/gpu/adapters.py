# SPDX-License-Identifier: Apache-2.0
"""LoRA under autocast, with peft's cast of its input and without it."""

from typing import Any

import torch

from .cell import Outcome, Setup
from .head_loss import GRADIENT_BOUND, distance
from .timing import milliseconds


def lora_cast(setup: Setup) -> Outcome:
    """Compare LoRA's gradients, and its time, without peft's cast and with it."""
    tokens = 32 if setup.tiny else 8192
    layer = lora_layer(setup)
    base = layer.get_base_layer()
    shape = (1, tokens, base.in_features)
    hidden = torch.randn(shape, device=setup.device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with torch.autocast(setup.device, torch.bfloat16):
            out = layer(hidden)
        out.sum().backward()

    outcome = Outcome()
    base_ms = milliseconds(lambda: base(hidden).sum().backward(), setup.device)
    outcome.rows.append({"what": "base layer without adapters", "ms": base_ms})
    gradients = []
    for name, cast in (("as peft has it", True), ("without the cast", False)):
        layer.cast_input_dtype_enabled = cast
        layer.zero_grad()
        step()
        trained = [weight for weight in layer.parameters() if weight.grad is not None]
        gradients.append([weight.grad.clone() for weight in trained])
        outcome.rows.append({"what": name, "ms": milliseconds(step, setup.device)})
    with_cast, without_cast = gradients
    pairs = zip(with_cast, without_cast, strict=True)
    largest = max(distance(gradient, reference) for reference, gradient in pairs)
    outcome.rows.append({"what": "gradients differ, relative", "largest": largest})
    outcome.ok = largest <= GRADIENT_BOUND
    return outcome


def lora_layer(setup: Setup) -> Any:
    """Return peft's LoRA of rank 16 on a frozen bf16 layer, both of its parts in fp32."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    inputs = 64 if setup.tiny else 4096
    outputs = 128 if setup.tiny else 14336
    base = torch.nn.Linear(inputs, outputs, bias=False, device=setup.device, dtype=torch.bfloat16)
    base.requires_grad_(False)
    layer = Linear(base, "default", config=LoraConfig(r=16), r=16, lora_alpha=32)
    layer = layer.to(setup.device)
    layer.lora_A.float()
    layer.lora_B.float()
    # B is initially zero, which would hide a difference.
    torch.nn.init.normal_(layer.lora_B["default"].get_parameter("weight"), std=0.02)
    return layer
