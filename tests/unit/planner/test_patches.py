# SPDX-License-Identifier: Apache-2.0
"""What the trace changes in other libraries is still needed."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from transformers import masking_utils
from transformers.integrations import moe

from measured.validation import training_arguments
from planner.fake_ranks import fake_ranks
from planner.patches import grouped_products, known_packing, real_meshes
from planner.plan import Plan


def test_transformers_takes_every_fake_sequence_for_packed_rows():
    row = torch.arange(4)[None]
    assert masking_utils.find_packed_sequence_indices(row) is None
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(row)
        assert masking_utils.find_packed_sequence_indices(fake) is not None


@pytest.mark.parametrize("packed", [False, True])
def test_the_trace_tells_it_instead(packed):
    with FakeTensorMode(), known_packing(packed):
        found = masking_utils.find_packed_sequence_indices(torch.arange(4)[None])
    assert (found is not None) == packed


def joined_mesh(accelerator):
    """The joint mesh that FSDP2 makes while it shards weights that tensor parallelism has split."""
    mesh = accelerator.torch_device_mesh
    return DeviceMesh._concatenate([mesh["dp_shard_cp"], mesh["tp"]])


def test_meshes_are_joined_beside_fake_tensors():
    plan = Plan(training_arguments([]), engine="fsdp2", ranks=4, shards=2, tp=2)
    with fake_ranks(plan) as accelerator, FakeTensorMode():
        with pytest.raises(AssertionError, match="convert all Tensors"):
            joined_mesh(accelerator)
        with real_meshes():
            assert joined_mesh(accelerator).size() == 4


def product_of_experts(precision):
    """Fake lines times two experts, whose weights are stored as [outputs, inputs]."""
    lines = torch.zeros(6, 16, dtype=precision, requires_grad=True)
    weights = torch.zeros(2, 32, 16, dtype=precision, requires_grad=True)
    ends = torch.zeros(2, dtype=torch.int32)
    return moe._grouped_mm(lines, weights.transpose(-2, -1), ends), weights


def test_experts_of_any_precision_are_computed_on_fake_tensors():
    with FakeTensorMode(), pytest.raises(RuntimeError, match="BF16"):
        product_of_experts(torch.float32)
    for precision in (torch.float32, torch.bfloat16):
        with FakeTensorMode(), grouped_products():
            product, weights = product_of_experts(precision)
            assert product.shape == (6, 32)
            product.square().sum().backward()
            # Otherwise autograd copies the gradient, which the trace would count
            assert weights.grad.stride() == weights.stride()


def test_a_fake_tensor_does_not_say_how_many_lines_go_to_each_rank():
    with FakeTensorMode(), pytest.raises(Exception, match="data-dependent|_local_scalar_dense"):
        torch.zeros(2, 2, dtype=torch.long).tolist()
