# SPDX-License-Identifier: Apache-2.0
"""FlashAttention without a package: `--attn_implementation varlen`.

It is the kernel of torch.nn.attention.varlen (torch 2.11 and newer). torch's sdpa keeps packed rows
apart by a mask of [tokens, tokens], which its FlashAttention kernel does not take. This attention
is given the end of each row instead (`ends_of_rows` in core/batches.py), computes nothing
between rows, and holds no mask.

Importing this module registers the name with transformers (AttentionInterface). The name must not
contain "flash", or transformers would look for a package. It is not registered with transformers'
masks, so that no mask is made and nothing is read from the device. Models in which `problem_of`
finds a problem are refused.
"""

import inspect
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

try:
    from torch.nn.attention import varlen as torch_varlen
except ImportError:  # torch 2.9 and older
    torch_varlen = None

KERNEL: Any = getattr(torch_varlen, "varlen_attn", None)
PARAMETERS = frozenset()  # The parameters of this torch's kernel
if KERNEL is not None:
    PARAMETERS = frozenset(inspect.signature(KERNEL).parameters)

NAME = "varlen"
# Arguments that models may pass to their attention and this kernel does not support
UNSUPPORTED = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")
LARGEST_HEAD = 256  # features; their number must be a multiple of 8


def is_available() -> bool:
    """Return whether this torch has the kernel with a window, which torch 2.10 lacks."""
    return "window_size" in PARAMETERS


# ---- Attention ----
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
        ValueError: if the kernel does not support an argument, or the ends of the rows are missing.
    """
    unsupported = unsupported_arguments(module, attention_mask, options)
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

    kernel_options: dict[str, Any] = {
        "scale": options.get("scaling"),
        "window_size": window_of(options.get("sliding_window")),
    }
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and "enable_gqa" in PARAMETERS:
        kernel_options["enable_gqa"] = True
    elif groups > 1:
        key = repeat_kv(key, groups)
        value = repeat_kv(value, groups)
    head_dim = query.shape[-1]
    value_dim = value.shape[-1]
    if value_dim < head_dim:  # This is so in DeepSeek's attention.
        value = torch.nn.functional.pad(value, [0, head_dim - value_dim])

    dtype = kernel_dtype(query)
    ends = ends.to(query.device)
    out = KERNEL(
        tokens_first(query, dtype),
        tokens_first(key, dtype),
        tokens_first(value, dtype),
        ends,
        ends,
        longest,
        longest,
        **kernel_options,
    )
    return out[None, ..., :value_dim], None


def unsupported_arguments(
    module: torch.nn.Module, attention_mask: torch.Tensor | None, options: Mapping[str, Any]
) -> list[str]:
    """Return the names of the arguments of a call that the kernel does not support."""
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if options.get("dropout"):
        unsupported.append("dropout")
    if attention_mask is not None:
        unsupported.append("attention_mask")
    if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unsupported.append("is_causal=False")
    return unsupported


def window_of(sliding_window: int | None) -> tuple[int, int]:
    """Return how many tokens each token sees to its left and to its right; -1 means no bound."""
    if sliding_window is None:
        return (-1, 0)
    return (sliding_window - 1, 0)


def kernel_dtype(query: torch.Tensor) -> torch.dtype:
    """Return the dtype to compute in: autocast's if norms or rotary positions returned fp32."""
    device_type = query.device.type
    if query.dtype == torch.float32 and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return query.dtype


def tokens_first(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return [1, heads, tokens, head_dim] as [tokens, heads, head_dim], which the kernel takes."""
    return tensor[0].transpose(0, 1).to(dtype)


# ---- Supported models ----
def problem_of(model: Any) -> str | None:
    """Return why this attention would be wrong in a model of transformers, or None."""
    config = model.config.get_text_config()
    calls = attention_calls(model)
    if not calls or not all("**kwargs" in call for call in calls):
        return "its layers do not pass the ends of rows to their attention"
    for name in UNSUPPORTED:
        if any(re.search(rf"\b{name}=", call) for call in calls):
            return f"its attention takes {name}"
    problem = problem_of_layer_types(config, calls)
    if problem is None:
        problem = problem_of_dropout(config)
    if problem is None:
        problem = problem_of_heads(config)
    return problem


def problem_of_layer_types(config: Any, calls: list[str]) -> str | None:
    """Return why layers of some type, or sliding windows, would be wrong, or None."""
    layer_types = set(getattr(config, "layer_types", None) or [])
    others = layer_types - {"full_attention", "sliding_attention"}
    if others:
        return f"it has layers of {', '.join(sorted(others))}"
    slides = "sliding_attention" in layer_types
    if not layer_types:
        slides = bool(getattr(config, "sliding_window", None))
    if slides and not all("sliding_window=" in call for call in calls):
        return "its sliding window is only in its masks"
    return None


def problem_of_dropout(config: Any) -> str | None:
    """Return which dropout of attention weights would be left out, or None."""
    for name in DROPOUTS:
        rate = getattr(config, name, None)
        if rate:
            return f"its config has {name} {rate}, and the kernel has no dropout"
    return None


def problem_of_heads(config: Any) -> str | None:
    """Return why the kernel does not take heads of this size, or None."""
    head_dim = getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    if head_dim % 8 == 0 and head_dim <= LARGEST_HEAD:
        return None
    return (
        f"its heads have {head_dim} features, "
        f"and the kernel takes multiples of 8 up to {LARGEST_HEAD}"
    )


def attention_calls(model: Any) -> list[str]:
    """Return the arguments of each call of the attention in a model's source, as text."""
    source = inspect.getsource(sys.modules[type(model.base_model).__module__])
    return re.findall(r"attention_interface\((.*?)\n +\)", source, re.DOTALL)


AttentionInterface.register(NAME, varlen_attention)
