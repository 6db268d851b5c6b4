# SPDX-License-Identifier: Apache-2.0
"""Attention that keeps the rows of a line apart where ranks share the line (DeepSpeed-Ulysses).

Within its attention each rank has the whole line for some of the heads. DeepSpeed drops the mask
there, since each rank's model made one of the rank's own part (deepspeed/runtime/
sequence_parallel/ulysses_sp.py, uattn_wrapper), and sdpa then lets the rows of a line see each
other. `attention_by_row` is given how long each row of the whole line is instead. It computes
nothing between rows, and holds no mask of [tokens, tokens].
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward


def keep_rows_apart() -> None:
    """Have DeepSpeed-Ulysses wrap an sdpa that keeps rows apart. Call it before `prepare`."""
    by_row = functools.partial(attention_by_row, sdpa_attention_forward)
    AttentionInterface.register("sdpa", by_row)


def attention_by_row(
    attention: Callable[..., Any],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    row_lengths: Sequence[Sequence[int]] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute causal attention in which each row of a line sees only itself.

    Args:
        attention: of transformers' AttentionInterface, for one row. The others are its arguments.
        query: [lines, heads, tokens, head_dim].
        key: the same with as many heads, or with a divisor of their number.
        value: as key.
        attention_mask: of whole lines; it is not used if rows share them.
        row_lengths: the tokens of each row of each line; the rest of a line is padding, which no
            row sees. None if rows do not share lines.

    Returns:
        [lines, tokens, heads, head_dim] and None, as transformers' attention functions do.
    """
    if row_lengths is None:
        return attention(module, query, key, value, attention_mask, **options)
    width = query.shape[2]
    lines = []
    for line, lengths in enumerate(row_lengths):
        own = slice(line, line + 1)
        pieces = []
        for row in rows_and_padding(lengths, width):
            q, k, v = (tensor[own, :, row] for tensor in (query, key, value))
            pieces.append(attention(module, q, k, v, None, **options)[0])
        lines.append(torch.cat(pieces, dim=1))
    return torch.cat(lines), None


def rows_and_padding(lengths: Sequence[int], width: int) -> list[slice]:
    """Return where each row of a line lies, and behind them the padding if there is any."""
    slices = []
    start = 0
    for length in [*lengths, width - sum(lengths)]:
        if length:
            slices.append(slice(start, start + length))
        start += length
    return slices
