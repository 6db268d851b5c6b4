# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of training, and a GPU's peak."""

from .models import Shape

# FLOP/s in dense bf16 (NVIDIA's data sheets, which state twice that, with sparsity)
PEAK = {"H100": 989e12, "H200": 989e12}


def peak_of(device: str) -> float | None:
    """Return the peak of a GPU in FLOP/s by its name, None if it is not known."""
    for card, peak in PEAK.items():
        if card in device:
            return peak
    return None


def matmul_weights(shape: Shape) -> int:
    """Return the number of a Llama's weights that are in matrix products.

    That includes the output head, but not the embedding of the input.
    """
    hidden = shape["hidden_size"]
    inner = shape["intermediate_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner
    return shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"]


def flops_per_token(shape: Shape, length: int, lora: bool = False, causal: bool = False) -> int:
    """Return the operations to train on one token of a row of `length`, without recomputation.

    There are 6 per weight: 2 forward, 2 for the gradient of its input, and 2 for its own gradient,
    which a frozen base under adapters does not need (4). Attention adds 12 x layers x hidden x
    length, as torchtitan and PaLM (arXiv 2204.02311, appendix B) count; half of that with
    causal=True, which leaves out what the mask hides. Adapters, under 1 %, are left out.
    """
    per_weight = 4 if lora else 6
    attention = 12 * shape["num_hidden_layers"] * shape["hidden_size"] * length
    if causal:
        attention //= 2
    return per_weight * matmul_weights(shape) + attention
