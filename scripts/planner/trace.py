# SPDX-License-Identifier: Apache-2.0
"""Trace one optimizer step of the real model on fake tensors, which have shapes but no bytes.

Under torch's FakeTensorMode tensors are allocated and freed as real ones are. The process group is
torch's fake one, which allows any number of ranks. Model, optimizer and loss are the recipe's own,
transformers splits the model over the ranks that share matrices or experts, torch's context
parallelism sends keys and values around a ring, and accelerate's `fsdp2_prepare_model` shards.

FSDP1 and DeepSpeed cannot be traced, since they read the addresses of tensors, which fake ones do
not have. Nor can bitsandbytes' kernels: `shapes.Quantized` stands in for them.
"""

import logging
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PretrainedConfig, PreTrainedModel

from . import recipe
from .closed_form import part_of
from .errors import UnplannableError, first_line
from .fake_ranks import Buckets, cut_by_ring, fake_ranks, first_rank, make_fake, prepare
from .ledger import Sizes
from .mesh import misfits_of_model
from .patches import even_routing, grouped_products, known_packing, real_meshes
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
    refuse_untraceable(plan, config, batch)
    torch.set_num_threads(1)
    # torch logs errors that it also raises.
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), quiet(), fake_ranks(plan) as accelerator:
        warnings.simplefilter("ignore")
        try:
            model = build(plan.args, config, accelerator)
            return traced(model, plan, batch, accelerator)
        except UnplannableError:
            raise
        # A model's own kernels may fail in any way on fake tensors on a CPU.
        except Exception as error:
            raise UnplannableError(
                f"--simulate: this model cannot be traced: {first_line(error)}"
            ) from None


def traced(model: PreTrainedModel, plan: Plan, batch: Batch, accelerator: Any) -> Sizes:
    """Return what `simulate` does. model: on the meta device."""
    with (
        FakeTensorMode(),
        known_packing(batch.packed),
        real_meshes(),
        grouped_products(),
        even_routing(),
        sdpa_kernel(SDPBackend.FLASH_ATTENTION),
    ):
        training = prepared(make_fake(model), plan, accelerator)
        return tracked(training, lambda: tensors_of(batch, plan))


def measure(plan: Plan, config: PretrainedConfig, batch: Batch) -> Sizes:
    """Return what `simulate` returns, but measured with real tensors in one process on the CPU.

    The planner is validated against it.
    """
    torch.manual_seed(0)
    accelerator = first_rank(plan)
    model = build(plan.args, config, accelerator, "cpu")
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return tracked(prepared(model, plan, accelerator), lambda: tensors_of(batch, plan))


def refuse_untraceable(plan: Plan, config: PretrainedConfig, batch: Batch) -> None:
    """Raise UnplannableError for what fake tensors cannot show."""
    misfits = misfits_of_model(config, plan.mesh)
    if misfits:
        raise UnplannableError("; ".join(misfits))
    if plan.engine not in ("single", "ddp", "fsdp2"):
        instead = "plan without --simulate"
        if plan.sp > 1:
            instead += ", or trace fsdp2_cp.yaml, under which ranks share rows too"
        raise UnplannableError(
            f"--simulate: {plan.name} reads the addresses of tensors, which fake tensors do not "
            f"have: {instead}"
        )
    if plan.cp > 1 and recipe.has_router_loss(plan.args):
        raise UnplannableError(
            "--simulate: under context parallelism recipes/mixtral.py looks for padding by its "
            "values, which fake tensors do not have: plan without --simulate"
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


# ---- Model, optimizer and batch ----
@dataclass(frozen=True)
class Training:
    """A model as `prepare` returns it to the recipe, its loss and its optimizer."""

    plan: Plan
    accelerator: Any  # the stand-in for rank 0's
    model: torch.nn.Module
    token_loss: recipe.LossInHead
    optimizer: torch.optim.Optimizer
    buckets: Buckets


def prepared(model: PreTrainedModel, plan: Plan, accelerator: Any) -> Training:
    """Return what the recipe has after `prepare`."""
    recipe.keep_split(model, accelerator)
    token_loss = recipe.prepare_model(
        model, plan.args, autocasts=plan.autocast_itemsize is not None
    )
    prepared_model = prepare(model, accelerator)
    args = plan.args
    if not args.optim.startswith("adamw_torch"):
        args = recipe.with_values(args, optim="adamw_torch")
    optimizer = recipe.make_optimizer(prepared_model, args)
    buckets = Buckets(prepared_model if plan.engine == "ddp" else torch.nn.Module())
    return Training(plan, accelerator, prepared_model, token_loss, optimizer, buckets)


def tensors_of(batch: Batch, plan: Plan) -> dict[str, Any]:
    """Return what the recipe's `collate` returns for a batch.

    A sequence holds one row, or two if it is packed. Where ranks share the tokens of a row, the
    tokens that are trained on are those of the fullest rank.
    """
    multiple = plan.mesh.multiple_of
    length = math.ceil(batch.length / multiple) * multiple
    inputs = {"input_ids": torch.zeros(batch.sequences, length, dtype=torch.long)}
    if batch.packed or plan.cp > 1:
        rows = 2 if batch.packed else 1
        positions = torch.arange(length) % math.ceil(length / rows)
        inputs["position_ids"] = positions.repeat(batch.sequences, 1)
    supervised = part_of(batch, plan.cp).supervised
    trained = torch.zeros(supervised, dtype=torch.long)
    tensors = {"inputs": inputs, "positions": trained, "targets": trained.clone()}
    if recipe.has_router_loss(plan.args):
        tensors["routed"] = {
            "places": torch.arange(batch.sequences * length),
            "row": torch.arange(batch.sequences).repeat_interleave(length),
            "lengths": torch.full((batch.sequences,), length),
        }
    return tensors


# ---- The step ----
def tracked(training: Training, make_batch: MakeBatch) -> Sizes:
    """Return the bytes at the peak of the second step.

    The first step allocates what stays: optimizer state, and the trackers' own caches.
    """
    step(training, make_batch)
    batch = make_batch()
    if training.plan.engine == "fsdp2":
        tracker = ShardTracker(training.model, training.optimizer)
    else:
        tracker = WholeTracker(training.model, training.optimizer, training.buckets.tensors)
    with tracker:
        step(training, lambda: batch, tracker.reset_mod_stats)
    return peak_of(tracker)


def step(
    training: Training, make_batch: MakeBatch, begin: Callable[[], None] = lambda: None
) -> None:
    """Run one optimizer step of the recipe: its loss, its clipping, its optimizer.

    begin: called after each micro-batch is made.
    """
    number = training.plan.args.gradient_accumulation_steps
    for index in range(number):
        batch = make_batch()
        begin()
        training.buckets.reduces = index == number - 1
        with cut_by_ring(batch["inputs"], training.accelerator) as inputs:
            forward_and_backward(training, batch | {"inputs": inputs})
        del batch, inputs
        training.token_loss.return_logits()
    trained = [weight for weight in training.model.parameters() if weight.requires_grad]
    # It reads nothing of the Accelerator.
    Accelerator._clip_grad_norm_dtensor_aware(training.accelerator, trained, CLIP)
    training.optimizer.step()
    training.optimizer.zero_grad()


def forward_and_backward(training: Training, batch: dict[str, Any]) -> None:
    """Run a micro-batch."""
    plan = training.plan
    autocasts = plan.autocast_itemsize is not None
    low = getattr(torch, DTYPES[plan.mixed_precision]) if autocasts else None
    with torch.autocast("cpu", low, enabled=autocasts):
        loss = recipe.summed_loss(
            plan.args, training.model, training.token_loss, batch, training.accelerator
        )
    loss.backward()
