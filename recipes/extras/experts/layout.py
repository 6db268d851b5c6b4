# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: each rank of a group has some of the experts of each layer, whole.

The ranks of a group have rows of their own. In each layer a token's hidden state goes to the ranks
of the experts that its router picks, and their results come back: two all-to-alls, and two more in
the backward pass (transformers/distributed/expert_parallel.py, AllToAllEP). So the gradient of an
expert is that of the rows of all ranks of its group. Groups have copies of the same experts: under
DDP each is whole, under FSDP2 the copies are shards of one another.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from core.engine import Layout, own_parts_only
from core.workarounds import fsdp_plugin
from extras.experts import workarounds

# The dimensions of the mesh: ranks with copies of the same experts; the group over which experts
# are spread; and a rank by itself, since no two ranks have the same rows
COPIES = "copies"
GROUP = "ep"
SINGLE = "single"


@dataclass(frozen=True)
class ExpertLayout(Layout):
    """Ranks with rows of their own that share the experts of each layer; `sizes` has "ep"."""

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh over whose groups experts are spread."""
        return make_expert_mesh(self.accelerator, self.sizes["ep"])

    @property
    def splits_weights(self) -> bool:
        """Whether each rank reads only its part of the weights."""
        return True

    def from_pretrained(self, auto_class: Any, name: str, **options: Any) -> Any:
        """Return from_pretrained's result with this rank's experts and all other weights.

        Raises:
            ValueError: if transformers has no plan by which to spread experts of this model.
        """
        size = self.sizes["ep"]
        spread = DistributedConfig(fsdp_size=size, ep_size=size, ep_implementation="all_to_all")
        with workarounds.spreading_experts_over(self.mesh, self.device):
            loaded = super().from_pretrained(auto_class, name, distributed_config=spread, **options)
        model, _ = loaded
        # Otherwise save_pretrained waits on the writing rank for ranks that do not call it.
        del model.config.distributed_config
        own_parts_only(model)
        if not any(True for _ in modules_of_experts(model)):
            raise ValueError(
                f"--ep_size: transformers has no plan by which to spread the experts of a "
                f"{model.config.model_type} model: leave it out"
            )
        if fsdp_plugin(self.accelerator) is not None:
            shard_copies(model, self.mesh, self.accelerator)
        return loaded


def make_expert_mesh(accelerator: Any, size: int) -> DeviceMesh:
    """Return the mesh of all ranks, as groups of neighbors that have all experts between them.

    Args:
        size: the number of ranks in a group.
    """
    shape = (accelerator.num_processes // size, size, 1)
    return init_device_mesh(accelerator.device.type, shape, mesh_dim_names=(COPIES, GROUP, SINGLE))


def average_under_ddp(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Have the gradients of experts be averaged over all ranks, as DDP averages the others.

    Call it on the prepared model: accelerate moves a model to its device, and torch then leaves the
    hooks of split weights behind (torch/nn/modules/module.py, _apply, swap_tensors).

    Args:
        model: loaded with its experts spread over the mesh.
        mesh: the result of `make_expert_mesh`.
    """
    for weight in model.parameters():
        if isinstance(weight, DTensor) and weight.requires_grad:
            weight.register_hook(averaging_over(mesh[COPIES]))


def averaging_over(copies: DeviceMesh) -> Any:
    """Return a hook that makes a gradient the average over the ranks that have the same experts.

    The gradient is the sum over the rows of the rank's group already.

    Args:
        copies: the dimension of the mesh; one rank per group.
    """
    num_ranks = torch.distributed.get_world_size()

    def average(gradient: DTensor) -> DTensor:
        part = gradient.to_local() / num_ranks
        if copies.size() > 1:
            torch.distributed.all_reduce(part, group=copies.get_group())
        return DTensor.from_local(part, gradient.device_mesh, gradient.placements, run_check=False)

    return average


def shard_copies(model: torch.nn.Module, mesh: DeviceMesh, accelerator: Accelerator) -> None:
    """Have FSDP2 shard the experts of a rank over the ranks that have the same ones.

    accelerate's FSDP2 then leaves them as they are, and shards the rest over all ranks. What FSDP2
    adds up over copies are sums over the rows of each group, so it has to divide by the number of
    all ranks.
    """
    plugin = fsdp_plugin(accelerator)
    for experts in modules_of_experts(model):
        if accelerator.mixed_precision != "no":  # As accelerate does, before it shards.
            for weight in experts.parameters():
                weight.data = weight.data.float()
        unit = fully_shard(
            experts,
            mesh=mesh[COPIES],
            reshard_after_forward=plugin.reshard_after_forward,
            offload_policy=plugin.cpu_offload,
            mp_policy=plugin.mixed_precision_policy or MixedPrecisionPolicy(),
        )
        unit.set_gradient_divide_factor(float(mesh.size()))
        if mesh[COPIES].size() > 1:
            # Other backends than NCCL cannot divide while they add up, and NCCL does it wrongly in
            # bf16 (pytorch/pytorch#190747): divide apart from it. A single copy adds up nothing.
            unit.set_force_sum_reduction_for_comms(True)


def modules_of_experts(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield the modules that own experts which are spread over ranks."""
    for module in model.modules():
        if any(isinstance(weight, DTensor) for weight in module.parameters(recurse=False)):
            yield module
