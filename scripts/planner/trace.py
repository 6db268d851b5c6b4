# SPDX-License-Identifier: Apache-2.0
"""Trace one optimizer step of the real model on fake tensors, which have shapes but no bytes.

Under torch's FakeTensorMode tensors are allocated and freed as real ones are. The process group is
torch's fake one, which allows any number of ranks. Model, optimizer and loss are the recipe's own,
and accelerate's `fsdp2_prepare_model` shards the model.

FSDP1 and DeepSpeed cannot be traced, since they read the addresses of tensors, which fake ones do
not have. Nor can bitsandbytes' kernels: `shapes.Quantized` stands in for them.
"""

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig, PreTrainedModel

from . import recipe
from .errors import UnplannableError, first_line
from .ledger import Sizes
from .patches import known_packing
from .plan import DTYPES, Plan
from .request import Batch
from .shapes import build, quiet
from .trackers import ShardTracker, WholeTracker, peak_of

CLIP = 1.0  # maximum gradient norm; clipping allocates the same for any value
MakeBatch = Callable[[], dict[str, Any]]


def simulate(plan: Plan, config: PretrainedConfig, batch: Batch) -> Sizes:
    """Return {category: bytes} of a rank's device at its peak, traced.

    Raises UnplannableError for what cannot be traced.
    """
    refuse_untraceable(plan, batch)
    torch.set_num_threads(1)
    model = build_for(plan, config)
    # torch logs errors that it also raises.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with (
        warnings.catch_warnings(),
        quiet(),
        fake_ranks(plan) as mesh,
        FakeTensorMode(),
        known_packing(batch.packed),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        warnings.simplefilter("ignore")
        try:
            training = prepared(make_fake(model), plan, mesh)
            return tracked(training, plan, lambda: tensors_of(batch))
        # A model's own kernels may fail in any way on fake tensors on a CPU.
        except Exception as error:
            raise UnplannableError(
                f"--simulate: this model cannot be traced: {first_line(error)}"
            ) from None


def measure(plan: Plan, config: PretrainedConfig, batch: Batch) -> Sizes:
    """Return what `simulate` returns, but measured with real tensors in one process on the CPU.

    The planner is validated against it.
    """
    torch.manual_seed(0)
    model = build_for(plan, config, "cpu")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return tracked(prepared(model, plan, None), plan, lambda: tensors_of(batch))


def build_for(plan: Plan, config: PretrainedConfig, device: str = "meta") -> PreTrainedModel:
    """Return the model that is trained under a plan."""
    return build(plan.args, config, device, plan.mixed_precision, plan.engine == "fsdp2")


def refuse_untraceable(plan: Plan, batch: Batch) -> None:
    """Raise UnplannableError for what fake tensors cannot show."""
    if plan.engine not in ("single", "ddp", "fsdp2"):
        raise UnplannableError(
            f"--simulate: {plan.name} reads the addresses of tensors, which fake tensors do not "
            "have: plan without --simulate"
        )
    if plan.copies * plan.ep > 1:
        raise UnplannableError(
            f"--simulate: traces whole rows and matrices, of which {plan.name} has parts: "
            "plan without --simulate"
        )
    if plan.offloads_parameters:
        raise UnplannableError(
            "--simulate: fake tensors are on one device, so that offload moves nothing: "
            "plan without --simulate"
        )
    if plan.args.optim.endswith("bit"):
        raise UnplannableError(
            f"--simulate: bitsandbytes' {plan.args.optim} does not support fake tensors: "
            "plan without --simulate"
        )
    if batch.packed and plan.args.attn_implementation not in (None, "eager", "sdpa"):
        raise UnplannableError(
            f"--simulate: traces sdpa, not {plan.args.attn_implementation}: plan without --simulate"
        )


# ---- Fake tensors and ranks ----
def make_fake(model: PreTrainedModel) -> PreTrainedModel:
    """Replace the meta tensors of a model with fake tensors on the CPU; return the model.

    Tied tensors stay tied. Call it under FakeTensorMode.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in made:
                tensor = torch.empty(weight.shape, dtype=weight.dtype)
                made[id(weight)] = torch.nn.Parameter(tensor, weight.requires_grad)
            module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


@contextlib.contextmanager
def fake_ranks(plan: Plan) -> Generator[DeviceMesh | None]:
    """Yield the mesh of the plan's ranks, which exist in name only, or None without sharding."""
    if plan.engine != "fsdp2":
        yield None
        return
    replicas = plan.ranks // plan.shards
    sizes = {"dp_shard": plan.shards}
    if replicas > 1:
        sizes = {"dp_replicate": replicas, "dp_shard": plan.shards}
    dist.init_process_group("fake", rank=0, world_size=plan.ranks, store=FakeStore())
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


# ---- Model, optimizer and batch ----
@dataclass(frozen=True)
class Training:
    """A model as `prepare` returns it to the recipe, its loss and its optimizer."""

    model: torch.nn.Module
    token_loss: recipe.LossInHead
    optimizer: torch.optim.Optimizer


def prepared(model: PreTrainedModel, plan: Plan, mesh: DeviceMesh | None) -> Training:
    """Return what the recipe has after `prepare`."""
    token_loss = recipe.prepare_model(
        model, plan.args, autocasts=plan.autocast_itemsize is not None
    )
    sharded: torch.nn.Module = model
    if mesh is not None:
        sharded = shard(model, plan, mesh)
    args = plan.args
    if not args.optim.startswith("adamw_torch"):
        args = recipe.with_values(args, optim="adamw_torch")
    return Training(sharded, token_loss, recipe.make_optimizer(sharded, args))


def shard(model: torch.nn.Module, plan: Plan, mesh: DeviceMesh) -> torch.nn.Module:
    """Return the model sharded over the mesh as accelerate does under FSDP2."""
    policy = MixedPrecisionPolicy()
    if plan.mixed_precision in DTYPES:  # The recipes reduce in fp32 (reduce_in_fp32).
        low = getattr(torch, DTYPES[plan.mixed_precision])
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=plan.reshards,
        auto_wrap_policy="transformer_based_wrap",
        cpu_offload=False,
        cpu_ram_efficient_loading=False,
        mixed_precision_policy=policy,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision=plan.mixed_precision,
        is_main_process=False,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, model)


def tensors_of(batch: Batch) -> dict[str, Any]:
    """Return what the recipe's `collate` returns for a batch.

    A sequence holds one row, or two if it is packed.
    """
    shape = batch.sequences, batch.length
    inputs = {"input_ids": torch.zeros(shape, dtype=torch.long)}
    if batch.packed:
        half = math.ceil(batch.length / 2)
        positions = torch.arange(batch.length) % half
        inputs["position_ids"] = positions.repeat(batch.sequences, 1)
    trained = torch.zeros(batch.supervised, dtype=torch.long)
    return {"inputs": inputs, "positions": trained, "targets": trained.clone()}


# ---- The step ----
def tracked(training: Training, plan: Plan, make_batch: MakeBatch) -> Sizes:
    """Return the bytes at the peak of the second step.

    The first step allocates what stays: optimizer state, and the trackers' own caches.
    """
    step(training, plan, make_batch)
    batch = make_batch()
    tracker_class = ShardTracker if plan.engine == "fsdp2" else WholeTracker
    tracker = tracker_class(training.model, training.optimizer)
    with tracker:
        step(training, plan, lambda: batch, tracker.reset_mod_stats)
    return peak_of(tracker)


def step(
    training: Training,
    plan: Plan,
    make_batch: MakeBatch,
    begin: Callable[[], None] = lambda: None,
) -> None:
    """Run one optimizer step of the recipe: its loss, its clipping, its optimizer.

    begin: called after each micro-batch is made.
    """
    autocasts = plan.autocast_itemsize is not None
    low = getattr(torch, DTYPES[plan.mixed_precision]) if autocasts else None
    for _ in range(plan.args.gradient_accumulation_steps):
        batch = make_batch()
        begin()
        with torch.autocast("cpu", low, enabled=autocasts):
            loss = training.token_loss(training.model, batch)
        loss.backward()
        del loss, batch
        training.token_loss.forget_batch()
    trained = [weight for weight in training.model.parameters() if weight.requires_grad]
    torch.nn.utils.clip_grad_norm_(trained, CLIP)
    training.optimizer.step()
    # DDP's gradients stay allocated, since they are views of its buckets.
    training.optimizer.zero_grad(set_to_none=plan.engine != "ddp")
