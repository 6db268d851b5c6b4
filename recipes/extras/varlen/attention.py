# SPDX-License-Identifier: Apache-2.0
"""The kernel of torch.nn.attention.varlen as an attention of transformers.

torch's sdpa keeps packed rows apart by a mask of [tokens, tokens], which its FlashAttention kernel
does not take. This attention is given the end of each row instead (`ends_of_rows` in
core/batches.py), computes nothing between rows, and holds no mask.

Importing this module registers the name "varlen" with transformers (AttentionInterface). The name
must not contain "flash", or transformers would look for a package. It is not registered with
transformers' masks, so that no mask is made and nothing is read from the device.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

NAME = "varlen"
# Arguments that models may pass to their attention and this kernel does not support
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")


def varlen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention over rows in one line, each of which sees only itself.

    Args:
        query: [1, heads, tokens, head_dim].
        key: the same with as many heads, or with a divisor of their number.
        value: as key.
        attention_mask: must be None.
        options: `cu_seq_lens_q`, the start of each row and the end of the last, int32, [rows + 1];
            `max_length_q`, the tokens of the longest row; `scaling`, the factor of the scores,
            None for 1 / sqrt(head_dim); `sliding_window`, the number of tokens that each token
            sees, itself included, None for no bound. Others are those of transformers' attention
            functions.

    Returns:
        [1, tokens, heads, head_dim] and None, as transformers' attention functions do.

    Raises:
        ValueError: if the attention would be wrong: the kernel does not support an argument or a
            layer, or the ends of the rows are missing.
    """
    unsupported = find_unsupported(module, attention_mask, options)
    if unsupported:
        raise ValueError(
            f"--attn_implementation {NAME} does not support what this model needs: "
            f"{', '.join(unsupported)}"
        )
    ends = options.get("cu_seq_lens_q")
    longest = options.get("max_length_q")
    if ends is None or longest is None or query.shape[0] != 1:
        raise ValueError(
            f"--attn_implementation {NAME} needs all rows in one line, "
            "with cu_seq_lens_q and max_length_q"
        )
    head_dim = query.shape[-1]
    value_dim = value.shape[-1]
    if value_dim < head_dim:  # This is so in DeepSeek's attention
        value = torch.nn.functional.pad(value, [0, head_dim - value_dim])
    dtype = kernel_dtype(query)
    ends = ends.to(query.device)
    out: Any = varlen_attn(
        tokens_first(query, dtype),
        tokens_first(key, dtype),
        tokens_first(value, dtype),
        ends,
        ends,
        longest,
        longest,
        scale=options.get("scaling"),
        window_size=window_of(options.get("sliding_window")),
        enable_gqa=query.shape[1] > key.shape[1],
    )
    return out[None, ..., :value_dim], None


def find_unsupported(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, options: Mapping[str, Any]
) -> list[str]:
    """Return what a call, or its layer, needs that the kernel does not have."""
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if options.get("dropout"):
        unsupported.append("dropout")
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unsupported.append("is_causal=False")
    # What is only in masks is not passed, and would be left out
    config = getattr(module, "config", None)
    layer_types = getattr(config, "layer_types", None) or []
    others = set(layer_types) - {"full_attention", "sliding_attention"}
    unsupported += [f"layers of {kind}" for kind in sorted(others)]
    slides = "sliding_attention" in layer_types
    if not layer_types:
        slides = bool(getattr(config, "sliding_window", None))
    if slides and "sliding_window" not in options:
        unsupported.append("a sliding window that is only in its masks")
    return unsupported


def window_of(sliding_window: int | None) -> tuple[int, int]:
    """Return how many tokens each token sees to its left and to its right; -1 means no bound."""
    return (-1, 0) if sliding_window is None else (sliding_window - 1, 0)


def kernel_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: autocast's if norms or rotary positions returned fp32."""
    device_type = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return query.dtype


def tokens_first(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [1, heads, tokens, head_dim] as [tokens, heads, head_dim], which the kernel takes."""
    return tensor[0].transpose(0, 1).to(dtype)


AttentionInterface.register(NAME, varlen_attention)
