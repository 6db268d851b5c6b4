"""FlashAttention without a package: `--attn_implementation varlen`, by torch.nn.attention.varlen (torch 2.11 and newer).

torch's sdpa keeps packed rows apart by a mask of [tokens, tokens], which its FlashAttention kernel does not take. This
attention is told where each row ends instead (`ends_of_rows` of the recipes), computes nothing between rows, and holds
no mask. preflight.py imports this file, which registers the name with transformers (AttentionInterface), and refuses
models for which `problem_of` has a reason. The name must not contain "flash": transformers would look for a package.
It is not registered with transformers' masks, so that no mask is made and nothing is read from the device.
"""

import inspect
import re
import sys

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

try:
    from torch.nn.attention.varlen import varlen_attn

    PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:
    varlen_attn, PARAMETERS = None, frozenset()

NAME = "varlen"
# What models hand to their attention besides queries, keys and values, and this kernel cannot do
UNKNOWN = ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices")
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def is_available():
    """Return whether this torch has the kernel, in the form that takes a window (2.10 had another one)."""
    return "window_size" in PARAMETERS


def varlen_attention(
    module,
    query,
    key,
    value,
    attention_mask,
    dropout=0.0,
    scaling=None,
    sliding_window=None,
    cu_seq_lens_q=None,
    max_length_q=None,
    **others,
):
    """Causal attention over rows that lie behind one another in one line, each of which sees itself alone.

    query: [1, heads, tokens, head_dim]; key and value: the same with as many heads or a divisor of their number.
    cu_seq_lens_q: where each row begins, and the end, int32, [rows + 1]. max_length_q: tokens of the longest row.
    sliding_window: tokens that each one sees at most, itself included. Returns [1, tokens, heads, head_dim] and None,
    as transformers' attention functions do. Raises ValueError for what the kernel cannot do.
    """
    given = [name for name in UNKNOWN if others.get(name) is not None]
    if dropout:
        given.append("dropout")
    if attention_mask is not None:
        given.append("attention_mask")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        given.append("is_causal=False")
    if given:
        raise ValueError(f"--attn_implementation {NAME} cannot do what this model asks for: {', '.join(given)}")
    if cu_seq_lens_q is None or max_length_q is None or query.shape[0] != 1:
        raise ValueError(f"--attn_implementation {NAME} needs all rows in one line, with cu_seq_lens_q and max_length_q")

    dtype = query.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):  # as norms and rotary positions leave it
        dtype = torch.get_autocast_dtype(query.device.type)
    groups = query.shape[1] // key.shape[1]
    options = {"scale": scaling, "window_size": (-1, 0)}  # minus one: no bound on the left; 0: nothing on the right
    if sliding_window is not None:
        options["window_size"] = (sliding_window - 1, 0)
    if groups > 1 and "enable_gqa" in PARAMETERS:
        options["enable_gqa"] = True
    elif groups > 1:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    if value_dim < head_dim:  # of DeepSeek's attention
        value = torch.nn.functional.pad(value, [0, head_dim - value_dim])
    query, key, value = (part[0].transpose(0, 1).to(dtype) for part in (query, key, value))
    ends = cu_seq_lens_q.to(query.device)
    out = varlen_attn(query, key, value, ends, ends, max_length_q, max_length_q, **options)
    return out[None, ..., :value_dim], None


def problem_of(model):
    """Return why this attention would be wrong for a model of transformers, or None."""
    config = model.config.get_text_config()
    source = inspect.getsource(sys.modules[type(model.base_model).__module__])
    calls = re.findall(r"attention_interface\((.*?)\n +\)", source, re.DOTALL)
    if not calls or not all("**kwargs" in call for call in calls):
        return "its layers do not tell their attention where rows end"
    for name in UNKNOWN:
        if any(re.search(rf"\b{name}=", call) for call in calls):
            return f"its attention takes {name}"
    kinds = set(getattr(config, "layer_types", None) or [])
    others = kinds - {"full_attention", "sliding_attention"}
    if others:
        return f"it has layers of {', '.join(sorted(others))}"
    slides = "sliding_attention" in kinds or not kinds and getattr(config, "sliding_window", None)
    if slides and not all("sliding_window=" in call for call in calls):
        return "its sliding window is in its masks alone"
    for name in DROPOUTS:
        if getattr(config, name, None):
            return f"its config has {name} {getattr(config, name)}, and the kernel drops nothing out"
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim % 8 or head_dim > 256:
        return f"its heads have {head_dim} features, and the kernel takes multiples of 8 up to 256"
    return None


AttentionInterface.register(NAME, varlen_attention)
