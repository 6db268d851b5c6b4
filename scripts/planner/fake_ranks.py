# SPDX-License-Identifier: Apache-2.0
"""The ranks of a plan in name only: torch's fake process group, and what rank 0 has of a model.

A fake group has any number of ranks, and its collectives return at once. Rank 0's Accelerator is a
stand-in with what the recipes and accelerate's `fsdp2_prepare_model` ask one for, so
that both make of a model what they make of it in a launch.
"""

import contextlib
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType
from accelerate.big_modeling import _attach_context_parallel_hooks
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.experimental import context_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PreTrainedModel

from extras.experts.layout import make_expert_mesh
from rehearsal.cpu_patches import attend_by_a_ring

from .plan import DTYPES, Plan

CPU = torch.device("cpu")
SHARDS = "dp_shard_cp"  # accelerate's name of the joint dimension over which FSDP2 shards


@contextlib.contextmanager
def fake_ranks(plan: Plan) -> Generator[Any]:
    """Yield the stand-in for rank 0's Accelerator, with a process group of all ranks behind it."""
    dist.init_process_group("fake", rank=0, world_size=plan.ranks, store=FakeStore())
    try:
        accelerator = first_rank(plan, make_mesh(plan))
        if plan.ep > 1:
            accelerator.expert_mesh = make_expert_mesh(accelerator, plan.ep)
        yield accelerator
    finally:
        dist.destroy_process_group()
        # DTensor remembers what it did on a mesh, and takes an equal mesh for the same one.
        _clear_sharding_prop_cache()


def make_mesh(plan: Plan) -> DeviceMesh | None:
    """Return the mesh that accelerate makes, or None where no ranks share anything."""
    mesh = plan.mesh
    sizes = {"dp_replicate": mesh.dp_replicate, "dp_shard": mesh.dp_shard}
    sizes = sizes if plan.engine == "fsdp2" else {}
    sizes |= {"cp": mesh.cp, "tp": mesh.tp}
    sizes = {name: size for name, size in sizes.items() if size > 1 or name == "dp_shard"}
    if not sizes:
        return None
    made = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if plan.engine == "fsdp2":
        made[tuple(name for name in ("dp_shard", "cp") if name in sizes)]._flatten(SHARDS)
    return made


def first_rank(plan: Plan, mesh: DeviceMesh | None = None) -> Any:
    """Return the stand-in for rank 0's Accelerator. mesh: of all ranks, or None."""
    sizes = plan.mesh
    replicas = ["dp_replicate"] if sizes.dp_replicate > 1 else []
    parallelism = SimpleNamespace(
        dp_replicate_size=sizes.dp_replicate,
        dp_shard_size=sizes.dp_shard,
        cp_size=sizes.cp,
        sp_size=sizes.sp,
        tp_size=sizes.tp,
        fsdp_dim_names=[*replicas, SHARDS],
    )
    is_fsdp2 = plan.engine == "fsdp2"
    return SimpleNamespace(
        distributed_type=DistributedType.FSDP if is_fsdp2 else DistributedType.NO,
        num_processes=plan.ranks,
        process_index=0,
        is_main_process=False,
        is_fsdp2=is_fsdp2,
        # accelerate autocasts under FSDP2 too, which casts by itself: autocast stands in for it.
        native_amp=plan.autocast_itemsize is not None,
        mixed_precision=plan.mixed_precision,
        device=CPU,
        parallelism_config=parallelism,
        torch_device_mesh=mesh,
        expert_ranks=plan.ep,
        state=SimpleNamespace(fsdp_plugin=fsdp_plugin(plan) if is_fsdp2 else None),
    )


def fsdp_plugin(plan: Plan) -> FullyShardedDataParallelPlugin:
    """Return accelerate's settings of FSDP2."""
    policy = MixedPrecisionPolicy()
    if plan.mixed_precision in DTYPES:  # The recipes reduce in fp32 (reduce_in_fp32).
        low = getattr(torch, DTYPES[plan.mixed_precision])
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    return FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.reshards,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=policy,
    )


# ---- The model ----
def make_fake(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the meta tensors of a model with fake tensors on the CPU; return the model.

    Tied tensors stay tied, and split ones split. Call it under FakeTensorMode.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in made:
                made[id(weight)] = torch.nn.Parameter(fake_of(weight), weight.requires_grad)
            module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake_of(buffer)
    return model


def fake_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor like one on the meta device."""
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype)
    return DTensor.from_local(
        fake_of(tensor._local_tensor),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def prepare(model: torch.nn.Module, accelerator: Any) -> torch.nn.Module:
    """Return a model as accelerate's `prepare` makes it: sharded by FSDP2, attending by a ring."""
    if accelerator.parallelism_config.cp_size > 1:
        _attach_context_parallel_hooks(model)
    if accelerator.is_fsdp2:
        return fsdp2_prepare_model(accelerator, model)
    return model


class Buckets:
    """DDP's buckets, which stay allocated and take a gradient once its last micro-batch is done.

    Until then gradients are added up outside of them. Split experts have none.

    Args:
        model: whose gradients DDP reduces.

    Attributes:
        reduces: whether the micro-batch is the last one of its step.
        tensors: one for each gradient.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.reduces = True
        self.tensors = []
        for weight in model.parameters():
            if weight.requires_grad and not isinstance(weight, DTensor):
                bucket = torch.empty_like(weight, requires_grad=False)
                self.tensors.append(bucket)
                weight.register_post_accumulate_grad_hook(self.filling(bucket))

    def filling(self, bucket: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Return a hook that moves the gradient of a weight into a bucket."""

        def fill(weight: torch.Tensor) -> None:
            if self.reduces:
                weight.grad = bucket

        return fill


# ---- The batch ----
@contextlib.contextmanager
def cut_by_ring(inputs: dict[str, torch.Tensor], accelerator: Any) -> Generator[dict[str, Any]]:
    """Give rank 0 its tokens of a batch, whose attention goes around a ring in this context.

    The recipe's `part_of` does so too, but looks for the tokens that are trained on by their
    values.

    inputs: the arguments of the model, each [rows, tokens].
    """
    if accelerator.parallelism_config.cp_size == 1:
        yield inputs
        return
    attend_by_a_ring()
    own = {name: tensor.clone() for name, tensor in inputs.items()}
    whole = list(own.values())
    mesh = accelerator.torch_device_mesh["cp"]
    dimensions = [1] * len(whole)
    with context_parallel(
        mesh, buffers=whole, buffer_seq_dims=dimensions, no_restore_buffers=set(whole)
    ):
        yield own
