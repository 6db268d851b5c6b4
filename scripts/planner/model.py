# SPDX-License-Identifier: Apache-2.0
"""A recipe's model and micro-batch as fake tensors, which have shapes but no bytes."""

import contextlib
import math
import sys
from collections.abc import Generator
from typing import Any
from unittest import mock

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoConfig, PreTrainedModel, masking_utils
from transformers.integrations import moe
from transformers.quantizers.base import get_keys_to_not_convert

from core.engine import Layout
from core.loss import LossInHead
from core.model import base_model_of
from rehearsal.cpu_patches import attend_by_a_ring

from .plan import Batch, Plan

TRACED = 3  # layers, where all are alike
FP32 = 4  # bytes
# bitsandbytes' block sizes
WEIGHTS_PER_SCALE = 64
SCALES_PER_SCALE = 256  # in double quantization


# ---- What the recipe loads ----
def load(plan: Plan, layout: Layout) -> tuple[PreTrainedModel, int]:
    """Return the recipe's model without layers like others, and how many are left out.

    The recipe's own `load_model` makes it, with the layout's `from_pretrained` replaced by what
    reads only the config. Call it under FakeTensorMode.

    Args:
        layout: of the first rank.
    """
    left_out = 0

    def from_config(self: Any, auto_class: Any, name: str, **options: Any) -> Any:
        nonlocal left_out
        revision = options["revision"]
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        attention = options["attn_implementation"]
        if attention not in (None, "eager"):
            attention = "sdpa"  # Kernels of GPUs refuse other devices; their weights are the same.
        dtype = getattr(torch, options["dtype"])
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=attention)
        layers = layers_of(model)
        if len({facts_of(layer) for layer in layers}) == 1:
            left_out = max(len(layers) - TRACED, 0)
            del layers[TRACED - 1 : TRACED - 1 + left_out]
        if options["quantization_config"] is not None:
            quantize(model, options["quantization_config"])
        if "distributed_config" in options:
            untie(model)
            config, _, mesh = model.prepare_distribute_model(options["distributed_config"])
            model.maybe_distribute_model(model, config, mesh)
            model.tie_weights()
        return model, {"missing_keys": [], "mismatched_keys": []}

    recipe = sys.modules[type(plan.args).__module__]
    # A layout of a mesh reaches this one by super()
    reading = mock.patch.object(Layout, "from_pretrained", from_config)
    # To draw weights takes longer than all else
    drawing = mock.patch.object(PreTrainedModel, "init_weights", lambda one: one.tie_weights())
    with reading, drawing:
        return recipe.load_model(plan.args, layout), left_out


def facts_of(layer: torch.nn.Module) -> str:
    """Return what makes a layer differ from others: shapes of its weights, and its settings."""
    facts: list[Any] = []
    for module in layer.modules():
        facts.append(type(module))
        facts += [weight.shape for weight in module.parameters(recurse=False)]
        for key, value in vars(module).items():
            if key != "layer_idx" and isinstance(value, (int, float, str)):
                facts.append((key, value))
    return str(facts)


def layers_of(model: Any) -> torch.nn.ModuleList:
    """Return the decoder's layers: the first list of modules of a model without adapters."""
    return next(one for one in model.base_model.modules() if isinstance(one, torch.nn.ModuleList))


def untie(model: PreTrainedModel) -> None:
    """Give tied weights of a model parameters of their own, as they have while they are loaded."""
    for name in model.all_tied_weights_keys:
        path, _, own = name.rpartition(".")
        weight = torch.nn.Parameter(torch.empty_like(model.get_parameter(name)))
        setattr(model.get_submodule(path), own, weight)


# ---- Quantized layers ----
class Quantized(torch.nn.Linear):
    """A linear layer as bitsandbytes stores it, frozen.

    4-bit (arXiv 2305.14314): two weights per byte, in elements of the storage dtype, and an fp32
    scale for each block of 64. With double quantization a scale takes one byte, and 256 of those
    share an fp32 scale. int8 (arXiv 2208.07339): one byte per weight, an fp32 scale per row.

    Attributes:
        scale_bytes: bytes beside the weight.
    """

    def __init__(self, linear: torch.nn.Linear, how: Any) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.bias = linear.bias
        self.in_4bit = how.load_in_4bit
        packed = torch.empty(linear.weight.shape, dtype=torch.int8)
        self.scale_bytes = FP32 * linear.out_features
        if self.in_4bit:
            numel = packed.numel()
            dtype = how.bnb_4bit_quant_storage
            packed = torch.empty(math.ceil(numel / 2 / dtype.itemsize), 1, dtype=dtype)
            blocks = math.ceil(numel / WEIGHTS_PER_SCALE)
            self.scale_bytes = FP32 * (16 + blocks)  # with the values that four bits stand for
            if how.bnb_4bit_use_double_quant:
                scales_of_scales = math.ceil(blocks / SCALES_PER_SCALE)
                self.scale_bytes = FP32 * (16 + 256 + scales_of_scales) + blocks
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        if self.in_4bit:
            # pyrefly: ignore[missing-attribute]
            self.weight.quant_state = None  # by which the recipe recognizes bitsandbytes' weights

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of the product, with meaningless values."""
        if not self.in_4bit:
            return QuantizedProduct.apply(input, self)
        computes_in = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            computes_in = torch.get_autocast_dtype(input.device.type)
        out = QuantizedProduct.apply(input.to(computes_in), self).to(input.dtype)
        return out.clone()  # as peft's 4-bit layer does


class QuantizedProduct(torch.autograd.Function):
    """What bitsandbytes' matrix products allocate.

    4-bit keeps nothing of its input for the backward pass; int8 keeps all of it, and briefly copies
    it to fp16 and int8.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Quantized) -> torch.Tensor:
        """Allocate what the forward pass allocates."""
        ctx.layer = layer
        if not layer.in_4bit:
            ctx.kept = x
            copies = [torch.empty_like(x, dtype=dtype) for dtype in (torch.float16, torch.int8)]
            del copies
        lines = x.reshape(-1, layer.in_features)
        weight = lines.as_strided((layer.in_features, layer.out_features), (0, 0))  # takes nothing
        with torch.autocast(x.device.type, enabled=False):  # A product, as recomputation keeps it
            return lines.mm(weight).view(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Allocate what the backward pass allocates: the whole weight, dequantized."""
        (grad,) = gradients
        dequantized = grad.new_empty(ctx.layer.out_features, ctx.layer.in_features)
        return grad.matmul(dequantized), None


def quantize(model: torch.nn.Module, how: Any) -> None:
    """Replace linear layers with Quantized ones where transformers would quantize; freeze all.

    Args:
        how: transformers' BitsAndBytesConfig.
    """
    kept = get_keys_to_not_convert(model)
    for name, module in list(model.named_modules()):
        is_kept = any(name == key or name.endswith(f".{key}") for key in kept)
        if type(module) is torch.nn.Linear and not is_kept:
            model.set_submodule(name, Quantized(module, how))
    model.requires_grad_(False)


# ---- What the trace changes in other libraries ----
@contextlib.contextmanager
def libraries_that_take_fakes(plan: Plan, is_packed: bool) -> Generator[None]:
    """Have other libraries accept fake tensors, of which nobody can read a value.

    transformers reads from the values of positions whether rows share a line, and torch's grouped
    product takes fake tensors only in bf16. To cast weights torch would swap them, which it does
    not with weak references to them. sdpa is the kernel that GPUs choose, where it can be.
    """
    swap = torch.utils.swap_tensors

    def replace_data(weight: torch.Tensor, cast: torch.Tensor) -> None:
        if isinstance(weight, DTensor):
            swap(weight, cast)
        else:
            weight.data = cast.data

    def can_multiply(lines: Any, experts: torch.Tensor, offs: Any) -> bool:
        return experts.dtype == torch.bfloat16

    def find_packed(position_ids: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(position_ids) if is_packed else None

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(torch.utils, "swap_tensors", replace_data))
        enter(mock.patch.object(moe, "_can_use_grouped_mm", can_multiply))
        enter(mock.patch.object(masking_utils, "find_packed_sequence_indices", find_packed))
        enter(sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True))
        if plan.engine == "zero" and plan.stage == 3:
            # DeepSpeed's linear layer keeps its inputs for frozen weights too
            from deepspeed.runtime.zero.linear import zero3_linear_wrap

            enter(mock.patch("torch.nn.functional.linear", zero3_linear_wrap))
        yield


# ---- The loss of a micro-batch ----
@contextlib.contextmanager
def loss_of(
    plan: Plan, model: PreTrainedModel, token_loss: LossInHead, layout: Layout, batch: Batch
) -> Generator[torch.Tensor]:
    """Yield the recipe's loss of a micro-batch; the backward pass belongs into this context.

    Args:
        model: with what the recipe adds to it, on fake tensors.
        token_loss: that of the recipe in the model's head.
        layout: of the first rank.
    """
    args = plan.args
    recipe = sys.modules[type(args).__module__]
    dtype = plan.autocast_dtype
    tensors = tensors_of(plan, layout, batch)
    with cut_by_ring(tensors, plan, layout) as part:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            if hasattr(recipe, "compare_answers"):
                reference = None
                if recipe.runs_reference_before_training(args):
                    reference = torch.zeros(len(part["pairs"]), 2)
                preference, chosen_nll, _ = recipe.compare_answers(
                    layout, model, token_loss, part, reference, args
                )
                loss = preference + chosen_nll
            elif hasattr(recipe, "summed_losses"):
                base = base_model_of(model)
                top_k = base.config.get_text_config().num_experts_per_tok
                tokens, routers, _ = recipe.summed_losses(layout, model, token_loss, part, top_k)
                loss = tokens + recipe.router_loss_factor(base, args) * routers
            else:
                loss = token_loss(model, part)
        yield loss


def tensors_of(plan: Plan, layout: Layout, batch: Batch) -> dict[str, Any]:
    """Return what the recipe's collator returns for a batch, one row per line, or two if packed.

    All lines are as long as the longest.
    """
    width = math.ceil(batch.length / layout.multiple_of) * layout.multiple_of
    lines = batch.lines
    inputs = {"input_ids": torch.zeros(lines, width, dtype=torch.long)}
    if batch.is_packed or plan.cp > 1:
        rows = 2 if batch.is_packed else 1
        positions = torch.arange(width) % math.ceil(width / rows)
        inputs["position_ids"] = positions.repeat(lines, 1)
    supervised = torch.zeros(batch.part(plan.cp).supervised, dtype=torch.long)
    tensors = {"inputs": inputs, "positions": supervised, "targets": supervised.clone()}
    if hasattr(plan.args, "router_aux_loss_coef"):
        tensors["routed"] = {
            "places": torch.arange(lines * width),
            "row": torch.arange(lines).repeat_interleave(width),
            "lengths": torch.full((lines,), width),
        }
    if hasattr(plan.args, "beta"):
        tensors |= {
            "cells": supervised.clone(),
            "longest": width,
            "pairs": torch.arange(lines // 2),
        }
        tensors["starts"] = torch.zeros(lines, dtype=torch.long)
        tensors["lengths"] = torch.ones(2, lines // 2, dtype=torch.long)
    return tensors


@contextlib.contextmanager
def cut_by_ring(batch: dict[str, Any], plan: Plan, layout: Layout) -> Generator[dict[str, Any]]:
    """Give the first rank its tokens of a batch, whose attention goes around a ring.

    The layout's `part_of` does so too, but looks for the tokens that are trained on by their
    values.
    """
    if plan.cp == 1:
        yield batch
        return
    attend_by_a_ring()
    own = {name: tensor.clone() for name, tensor in batch["inputs"].items()}
    whole = list(own.values())
    accelerator: Any = layout.accelerator
    mesh = accelerator.torch_device_mesh["cp"]
    with context_parallel(
        mesh, buffers=whole, buffer_seq_dims=[1] * len(whole), no_restore_buffers=set(whole)
    ):
        yield batch | {"inputs": own}
