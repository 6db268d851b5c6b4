# SPDX-License-Identifier: Apache-2.0
"""Kernels of a GPU, flash attention among them, keep packed documents apart as those of a CPU."""

import pytest
import torch

from components import varlen
from components.packing import ends_of_rows
from mask_probe import ARCHITECTURES, distance_from_alone, leak, packed_batch, random_model

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="there is no GPU on this machine"
)
ALONE = 2e-2  # logits are about 0.5, and bf16 keeps eight bits
PLANTED = 0.1  # what a planted leak moves at least


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    "attention", ["eager", "sdpa", "flex_attention", "varlen", "flash_attention_2"]
)
def test_packed_documents_do_not_see_each_other(attention, architecture):
    if attention == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="flash-attn is not installed")
    if attention == "varlen" and not varlen.is_available():
        pytest.skip("this torch has no varlen_attn")
    model = random_model(architecture, attention, torch.bfloat16, "cuda")
    batch, owners = packed_batch(
        [7, 1, 10, 6], device="cuda"
    )  # flash attention packs only in batches of one row
    if attention == "varlen":
        batch |= ends_of_rows([7, 1, 10, 6])
    assert leak(model, batch, owners) == 0
    assert distance_from_alone(model, batch, owners) < ALONE
    batch["position_ids"] = torch.arange(24, device="cuda")[None]
    if attention == "varlen":
        batch |= ends_of_rows([24])
    assert leak(model, batch, owners) > PLANTED
