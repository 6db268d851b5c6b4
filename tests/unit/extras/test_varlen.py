# SPDX-License-Identifier: Apache-2.0
"""`--attn_implementation varlen`: packed rows give the same as each row by itself.

The kernel runs only on GPUs (evidence/gpu/test_precisions.py). Here a plain function with its
arguments stands in for it, so that registration, shapes, grouped heads, windows and the ends of
rows are shown; what the real one takes is looked at on tensors without memory.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from extras.varlen import attention
from mask_probe import ARCHITECTURES, distance_from_alone, leak, packed_batch, random_model

LENGTHS = [7, 1, 10, 6]
CLOSE = {"rtol": 1e-4, "atol": 1e-6}  # fp32, added in another order


def by_row(query, key, value, *ends, scale=None, window_size=(-1, -1), enable_gqa=False):
    """What torch documents of varlen_attn, row by row: [tokens, heads, head_dim]."""
    cu_seq_q, cu_seq_k, max_q, max_k = ends
    assert query.dim() == 3 and len(query) == len(key) == len(value)
    assert cu_seq_q.dtype == torch.int32 and cu_seq_q.equal(cu_seq_k)
    assert int(cu_seq_q[-1]) == len(query)
    assert int(cu_seq_q.diff().max()) == max_q == max_k
    assert query.shape[1] == key.shape[1] or enable_gqa
    rows = []
    starts = cu_seq_q.tolist()
    for start, end in zip(starts, starts[1:], strict=False):
        seen = seen_within(end - start, *window_size)
        parts = [tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value)]
        row = scaled_dot_product_attention(
            *parts, attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )
        rows.append(row[0].transpose(0, 1))
    return torch.cat(rows)


def seen_within(length, left, right):
    """Who sees whom in a row, [length, length]; -1: no bound on that side."""
    distance = torch.arange(length)[:, None] - torch.arange(length)
    seen = torch.ones(length, length, dtype=torch.bool)
    if left >= 0:
        seen &= distance <= left
    if right >= 0:
        seen &= distance >= -right
    return seen


@pytest.fixture
def calls(monkeypatch):
    """The stand-in instead of the kernel; the dtypes of its queries, keys and values."""
    seen = []

    def watched(query, key, value, *arguments, **options):
        seen.append((query.dtype, key.dtype, value.dtype))
        return by_row(query, key, value, *arguments, **options)

    monkeypatch.setattr(attention, "varlen_attn", watched)
    return seen


def ends_of(lengths):
    """Where rows of these lengths in one line begin and end, as arguments of the model."""
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def in_one_line(*lengths):
    """(batch, owners) of random rows of these lengths, with their ends."""
    batch, owners = packed_batch(list(lengths))
    return batch | ends_of(lengths), owners


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_gradients_are_those_of_each_row_alone(architecture, calls):
    ours, theirs = (random_model(architecture, name) for name in ("varlen", "sdpa"))
    theirs.load_state_dict(ours.state_dict())
    batch, owners = in_one_line(*LENGTHS)
    logits = ours(**batch).logits[0]
    rows = []
    for row in range(4):
        ids = batch["input_ids"][owners == row]
        rows.append(theirs(input_ids=ids[None], use_cache=False).logits[0])
    alone = torch.cat(rows)
    torch.testing.assert_close(logits, alone, **CLOSE)
    assert len(calls) == 2  # once per layer
    assert leak(ours, batch, owners) == 0
    assert leak(ours, batch | ends_of([24]), owners) > 0.01  # wrong ends would be seen
    assert distance_from_alone(ours, batch, owners) < 1e-6
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(0))
    (logits * weights).sum().backward()
    (alone * weights).sum().backward()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_under_autocast_the_kernel_gets_what_it_takes(calls):
    """Rotary positions and Qwen's norms leave queries and keys in fp32."""
    ours = random_model("qwen3", "varlen")
    with torch.autocast("cpu", torch.bfloat16):
        ours(**in_one_line(*LENGTHS)[0]).logits.sum().backward()
    assert set(calls) == {(torch.bfloat16,) * 3}


def test_the_real_kernel_takes_these_shapes():
    """Forward and backward pass on tensors without memory: arguments and shapes, not numbers."""
    model = random_model("mistral", "varlen", torch.bfloat16).to("meta")
    batch, _ = in_one_line(*LENGTHS)
    for name, value in batch.items():
        if isinstance(value, torch.Tensor):
            batch[name] = value.to("meta")
    logits = model(**batch).logits
    assert logits.shape == (1, 24, 320) and logits.dtype == torch.bfloat16
    logits.sum().backward()
    assert all(weight.grad.shape == weight.shape for weight in model.parameters())


@pytest.mark.parametrize(
    ("options", "config", "word"),
    [
        ({"softcap": 50.0}, {}, "softcap"),
        ({"s_aux": torch.zeros(4)}, {}, "s_aux"),
        ({"dropout": 0.1}, {}, "dropout"),
        ({"is_causal": False}, {}, "is_causal"),
        ({}, {"sliding_window": 5}, "only in its masks"),
        ({}, {"layer_types": ["full_attention", "chunked_attention"]}, "chunked_attention"),
    ],
)
def test_what_the_kernel_cannot_do_is_an_error(options, config, word, calls):
    query = torch.zeros(1, 4, 3, 16)
    module = torch.nn.Module()
    module.config = SimpleNamespace(**config)
    with pytest.raises(ValueError, match=word):
        attention.varlen_attention(module, query, query, query, None, **ends_of([3]) | options)
    assert not calls
