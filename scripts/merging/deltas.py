# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a merge for one tensor, in fp32 and in the order of peft 0.21.

The order matters: with it, the result is that of peft's `merge_and_unload` in fp32, bit for bit.
Shapes are of the matrices of an adapter: A [r, in], B [out, r].
"""

import torch


def of_linear(
    a: torch.Tensor, b: torch.Tensor, scaling: float, fan_in_fan_out: bool = False
) -> torch.Tensor:
    """Return what LoRA adds to the weight of a linear layer, [out, in].

    Args:
        fan_in_fan_out: whether the weight is stored as [in, out], as in GPT-2.
    """
    product = b.float() @ a.float()
    if fan_in_fan_out:
        product = product.T
    return product * scaling


def of_embedding(a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    """Return what LoRA adds to an embedding, [tokens, width].

    Args:
        a: [r, tokens].
        b: [width, r].
    """
    return (b.float() @ a.float()).T * scaling


def of_experts(
    a: torch.Tensor, b: torch.Tensor, scaling: float, num_experts: int, is_transposed: bool
) -> torch.Tensor:
    """Return what LoRA adds to the weights of all experts of a layer.

    Args:
        a: [experts x r, in].
        b: [out, r x experts].
        is_transposed: whether the weights are stored as [experts, in, out], as in gpt-oss.

    Returns:
        [experts, out, in], or [experts, in, out].
    """
    per_expert_a = a.float().reshape(num_experts, -1, a.shape[-1])
    per_expert_b = b.float().reshape(b.shape[0], -1, num_experts)
    order = "o r e, e r i -> e i o" if is_transposed else "o r e, e r i -> e o i"
    return torch.einsum(order, per_expert_b, per_expert_a) * scaling


def add(weight: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return a weight, of any floating-point dtype, with what LoRA adds to it, in fp32."""
    return weight.float() + delta


def add_with_magnitude(
    weight: torch.Tensor,
    delta: torch.Tensor,
    magnitude: torch.Tensor,
    fan_in_fan_out: bool = False,
) -> torch.Tensor:
    """Return the weight of a layer with DoRA, in fp32 (arXiv 2402.09353, equation 5).

    Args:
        weight: [out, in], or with fan_in_fan_out [in, out].
        magnitude: the length that was trained for each of the `out` rows.
    """
    changed = add(weight, delta)
    rows = changed.T if fan_in_fan_out else changed
    factor = (magnitude.float() / torch.linalg.norm(rows, dim=1)).view(-1, 1)
    if fan_in_fan_out:
        factor = factor.T
    return factor * changed
