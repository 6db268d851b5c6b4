# SPDX-License-Identifier: Apache-2.0
"""Workarounds for what other libraries get wrong with experts that are spread over ranks."""

import contextlib
import importlib
from collections.abc import Generator
from typing import Any

from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core.workarounds import workaround


class GroupsOfExperts:
    """Stands for transformers' mesh over all ranks; its groups are those of a mesh of experts."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def get_mesh(self, names: Any) -> Any:
        """Return the group over which experts are spread, or else the group of only this rank."""
        return self._mesh["ep" if names == "ep" else "single"]


@workaround("transformers/distributed/mixin.py, maybe_distribute_model", seen="transformers 5.23")
@contextlib.contextmanager
def spreading_experts_over(mesh: Any, device: Any) -> Generator[None]:
    """Have transformers spread experts over the groups of a mesh within this context, and no more.

    It spreads experts only over ranks over which it shards the other weights too, by FSDP2 without
    accelerate's settings. The engine of the YAML does that.

    Args:
        mesh: has the dimensions "ep" and "single".
    """
    mixin: Any = importlib.import_module("transformers.distributed.mixin")
    make_mesh = mixin.initialize_distributed_mesh
    shard = mixin.apply_fully_sharded_data_parallelism
    mixin.initialize_distributed_mesh = lambda config: (device, GroupsOfExperts(mesh))
    mixin.apply_fully_sharded_data_parallelism = lambda model, *_: model
    try:
        yield
    finally:
        mixin.initialize_distributed_mesh = make_mesh
        mixin.apply_fully_sharded_data_parallelism = shard


@workaround("https://github.com/pytorch/pytorch/issues/43690", seen="torch 2.13")
def leave_experts_out_of_ddp(model: Any) -> None:
    """Have DDP neither broadcast nor reduce the weights of which each rank has a part."""
    names = [name for name, weight in model.named_parameters() if isinstance(weight, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


@workaround("accelerate/accelerator.py, prepare_model", seen="accelerate 1.15")
@contextlib.contextmanager
def ddp_takes_split_weights() -> Generator[None]:
    """Stop accelerate from refusing DTensors beside DDP, which ignores them here."""
    module: Any = importlib.import_module("accelerate.accelerator")
    original = module.model_has_dtensor
    module.model_has_dtensor = lambda model: False
    try:
        yield
    finally:
        module.model_has_dtensor = original
