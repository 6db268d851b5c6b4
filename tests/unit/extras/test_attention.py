# SPDX-License-Identifier: Apache-2.0
"""Attention of whole lines whose rows do not see each other equals that of a mask between rows."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from extras.mesh.attention import attention_by_row
from fakes import sharing_rows

LENGTHS = [[3, 1, 5], [9], [4, 6]]  # in lines of 12 tokens
WIDTH, HEADS, FEATURES = 12, 4, 8


def owners_of_lines():
    """The row of each token in its line; -1 is padding."""
    owners = torch.full((len(LENGTHS), WIDTH), -1)
    for line, lengths in enumerate(LENGTHS):
        rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        owners[line, : len(rows)] = rows
    return owners


def random_lines(kv_heads):
    torch.manual_seed(0)
    shapes = [(len(LENGTHS), heads, WIDTH, FEATURES) for heads in (HEADS, kv_heads, kv_heads)]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def module_of(kv_heads):
    return SimpleNamespace(num_key_value_groups=HEADS // kv_heads, is_causal=True)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_it_equals_a_mask_between_rows_in_values_and_gradients(kv_heads):
    module = module_of(kv_heads)
    owners = owners_of_lines()
    same_row = owners[:, None, :, None] == owners[:, None, None, :]
    mask = same_row & torch.ones(WIDTH, WIDTH).tril().bool()
    is_text = (owners >= 0)[..., None, None]
    results = []
    for attention, options in (
        (sdpa_attention_forward, {"attention_mask": mask}),
        (attention_by_row, {"attention_mask": None, "row_lengths": LENGTHS}),
    ):
        tensors = random_lines(kv_heads)
        first = [sdpa_attention_forward] if attention is attention_by_row else []
        out, _ = attention(*first, module, *tensors, **options, scaling=0.3)
        (out * is_text).square().sum().backward()
        results.append([out * is_text, *(tensor.grad for tensor in tensors)])
    for expected, found in zip(*results, strict=True):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # a leak moves 0.1


def test_masks_are_heeded_within_the_context_and_dropped_again_behind_it():
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
    registered = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._local_mapping, sdpa="of DeepSpeed"):
        with sharing_rows(2).heeding_masks(model):
            assert ALL_ATTENTION_FUNCTIONS["sdpa"] is registered
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] == "of DeepSpeed"
