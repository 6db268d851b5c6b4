# SPDX-License-Identifier: Apache-2.0
"""What the rules on FSDP claim about torch."""

import pytest
from torch import distributed, nn
from torch.distributed.fsdp import FullyShardedDataParallel


@pytest.fixture
def one_rank(tmp_path):
    """A process group of this process."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("original", [True, False])
def test_flat_parameters_of_fsdp1_are_none_of_those_that_an_optimizer_made_before_holds(
    original, one_rank
):
    model = nn.Linear(4, 4)
    held = {id(parameter) for parameter in model.parameters()}
    wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id="cpu")
    assert held.isdisjoint(map(id, wrapped.parameters())) == (not original)
