# SPDX-License-Identifier: Apache-2.0
"""On CPU ranks, norms of gradients are as exact as on a GPU."""

import pytest
import torch

from rehearsal import cpu_patches

# One fp32 number is off by up to 2^-24. The norm of several tensors is rounded twice.
ROUNDING = 2**-23


@pytest.fixture
def gradients(monkeypatch):
    """Two matrices, whose norms torch adds up in fp32 with an error of more than ROUNDING."""
    for owner, name in ((torch.linalg, "vector_norm"), (torch, "_foreach_norm")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restores it after the test
    random = torch.Generator().manual_seed(0)
    gradients = [torch.randn(640, 320, generator=random) for _ in range(2)]
    assert error_of(torch.nn.utils.get_total_norm(gradients), gradients) > ROUNDING
    cpu_patches.sum_norms_in_double()
    return gradients


def error_of(norm, tensors):
    """The relative error of the norm of all tensors."""
    exact = torch.cat([tensor.flatten() for tensor in tensors]).double().norm().item()
    return abs(norm.item() - exact) / exact


@pytest.mark.parametrize("foreach", [True, False])
def test_the_norm_of_gradients_has_no_more_than_the_rounding_of_one_number(gradients, foreach):
    norm = torch.nn.utils.get_total_norm(gradients, foreach=foreach)
    assert norm.dtype == torch.float32
    assert error_of(norm, gradients) <= ROUNDING


def test_norms_in_other_precisions_are_left_as_they_are(gradients):
    halves = [gradient.bfloat16() for gradient in gradients]
    assert torch.linalg.vector_norm(halves[0]).dtype == torch.bfloat16
    assert torch._foreach_norm(halves, 2.0)[0].dtype == torch.bfloat16
