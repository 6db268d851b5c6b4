# SPDX-License-Identifier: Apache-2.0
"""A recipe's model and micro-batch as fake tensors, which have shapes but no bytes."""

import contextlib
import importlib
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
from transformers.quantizers.base import get_keys_to_not_convert

from core.engine import Layout
from core.loss import LossInHead
from core.model import base_model_of
from extras.mesh.workarounds import keep_gradients_split
from rehearsal.cpu_patches import attend_by_a_ring

from .plan import REHEARSE, Plan
from .request import Batch, UnplannableError

TRACED = 3  # layers, where all are alike
# bitsandbytes' block sizes
WEIGHTS_PER_SCALE = 64
SCALES_PER_SCALE = 256  # in double quantization


# ---- What the recipe loads ----
def load(plan: Plan, layout: Layout) -> tuple[PreTrainedModel, int]:
    """Return the recipe's model, on the meta device, and how many of its layers are left out.

    The recipe's own `load_model` makes it, with the layout's `from_pretrained` replaced by one that
    reads only the config.

    Args:
        layout: of the first rank.
    """
    left_out = 0

    class FromConfig(Layout):
        """Makes a model where another layout would read it."""

        def from_pretrained(self, auto_class: Any, name: str, **options: Any) -> Any:
            nonlocal left_out
            # Kernels of GPUs refuse other devices; their weights are the same
            attention = options["attn_implementation"]
            if attention not in (None, "eager"):
                attention = "sdpa"
            model, left_out = make_skeleton(
                auto_class, name, options["revision"], str(options["dtype"]), attention
            )
            if options["quantization_config"] is not None:
                quantize(model, options["quantization_config"])
            if "distributed_config" in options:
                untie(model)
                config, _, mesh = model.prepare_distribute_model(options["distributed_config"])
                model.maybe_distribute_model(model, config, mesh)
                model.tie_weights()
            return model, {"missing_keys": [], "mismatched_keys": []}

    # A layout of a mesh reaches FromConfig by super()
    bases = (FromConfig,) if type(layout) is Layout else (type(layout), FromConfig)
    own = type("Own", bases, {})(layout.accelerator, layout.sizes)
    recipe = sys.modules[type(plan.args).__module__]
    with torch.device("meta"):
        model = recipe.load_model(plan.args, own)
    return model, left_out


def make_skeleton(
    auto_class: Any, name: str, revision: str, dtype: str, attention: str | None
) -> tuple[PreTrainedModel, int]:
    """Return a model on the meta device, without layers like others, and how many are left out."""
    config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    with mock.patch.object(PreTrainedModel, "init_weights", tie):
        model = auto_class.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention
        )
    layers = layers_of(model)
    if len(layers) <= TRACED or len({str(facts_of(layer)) for layer in layers}) > 1:
        return model, 0
    left_out = len(layers) - TRACED
    del layers[TRACED - 1 : -1]
    return model, left_out


def tie(model: PreTrainedModel) -> None:
    """Tie weights without drawing them, which takes longer than all else."""
    model.tie_weights()


def facts_of(layer: torch.nn.Module) -> list[Any]:
    """Return what makes a layer differ from others: shapes of its weights, and its settings."""
    facts: list[Any] = []
    for name, module in layer.named_modules():
        facts.append((name, type(module)))
        for key, value in vars(module).items():
            if key != "layer_idx" and isinstance(value, (int, float, str)):
                facts.append((key, value))
        for weight in module.parameters(recurse=False):
            facts.append((weight.shape, weight.dtype))
    return facts


def layers_of(model: Any) -> torch.nn.ModuleList:
    """Return the decoder's layers: the first list of modules of a model without adapters.

    Raises:
        UnplannableError: if it has none.
    """
    for module in model.base_model.modules():
        if isinstance(module, torch.nn.ModuleList):
            return module
    raise UnplannableError(
        f"{type(model).__name__} has no list of layers at which to cut: {REHEARSE}"
    )


def make_fake(model: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Replace the meta tensors of a model with fake ones on the CPU, in the engine's precision.

    Tied weights stay tied, and split ones split. Call it under FakeTensorMode.
    """
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is None:
                continue
            if id(weight) not in made:
                dtype = weight.dtype
                if plan.low and plan.casts and dtype.is_floating_point:
                    dtype = plan.low
                fake = fake_of(weight, dtype)
                made[id(weight)] = torch.nn.Parameter(fake, weight.requires_grad)
            module._parameters[name] = made[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake_of(buffer, buffer.dtype)
    if plan.tp > 1:  # The new weights have no hooks.
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        keep_gradients_split(torch.nn.ParameterList(trained))
    return model


def fake_of(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a fake tensor in the shape of one on the meta device."""
    if not isinstance(tensor, DTensor):
        return torch.empty(tensor.shape, dtype=dtype)
    return DTensor.from_local(
        fake_of(tensor._local_tensor, dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def untie(model: PreTrainedModel) -> None:
    """Give tied weights of a model parameters of their own, as they have while they are loaded."""
    for name in model.all_tied_weights_keys:
        path, _, own = name.rpartition(".")
        weight = torch.nn.Parameter(torch.empty_like(model.get_parameter(name)))
        setattr(model.get_submodule(path), own, weight)


# ---- Quantized layers ----
class Quantized(torch.nn.Linear):
    """A linear layer as bitsandbytes stores it, frozen: packed weight, scales as buffers.

    4-bit (arXiv 2305.14314): two weights per byte, in elements of the storage dtype, and an fp32
    scale for each block of 64. With double quantization a scale takes one byte, and 256 of those
    share an fp32 scale. int8 (arXiv 2208.07339): one byte per weight, an fp32 scale per row.
    """

    def __init__(self, linear: torch.nn.Linear, how: Any) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.bias = linear.bias
        self.in_4bit = how.load_in_4bit
        weight = linear.weight
        scales = [torch.empty(linear.out_features)]
        packed = torch.empty(weight.shape, dtype=torch.int8)
        if self.in_4bit:
            dtype = how.bnb_4bit_quant_storage
            packed = torch.empty(math.ceil(weight.numel() / 2 / dtype.itemsize), 1, dtype=dtype)
            scales = scales_4bit(weight.numel(), how.bnb_4bit_use_double_quant)
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        if self.in_4bit:
            # pyrefly: ignore[missing-attribute]
            self.weight.quant_state = None  # by which the recipe recognizes bitsandbytes' weights
        for number, scale in enumerate(scales):
            self.register_buffer(f"scale_{number}", scale, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of the product, with meaningless values."""
        if not self.in_4bit:
            return QuantizedProduct.apply(input, self)
        computes_in = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            computes_in = torch.get_autocast_dtype(input.device.type)
        out = QuantizedProduct.apply(input.to(computes_in), self).to(input.dtype)
        return out.clone()  # as peft's 4-bit layer does


def scales_4bit(numel: int, double_quant: bool) -> list[torch.Tensor]:
    """Return empty tensors of what bitsandbytes keeps besides `numel` weights in 4 bits."""
    code = torch.empty(16)  # the values that four bits stand for
    blocks = math.ceil(numel / WEIGHTS_PER_SCALE)
    if not double_quant:
        return [torch.empty(blocks), code]
    byte_scales = torch.empty(blocks, dtype=torch.uint8)
    scales_of_scales = torch.empty(math.ceil(blocks / SCALES_PER_SCALE))
    return [byte_scales, scales_of_scales, torch.empty(256), code]


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
        return x.new_empty(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Allocate what the backward pass allocates: the whole weight, dequantized."""
        (grad,) = gradients
        layer = ctx.layer
        dequantized = grad.new_empty(layer.out_features, layer.in_features)
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
    for weight in model.parameters():
        weight.requires_grad_(False)


# ---- What the trace changes in other libraries ----
class GroupedProduct(torch.autograd.Function):
    """What torch's grouped product of matrices allocates: lines, sorted by expert, times experts.

    It keeps the lines for experts that are trained, and the experts for lines that have gradients.
    """

    @staticmethod
    def forward(ctx: Any, lines: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return an empty product, [lines, outputs], of [lines, inputs] and [experts, ..., ...]."""
        of_lines, of_experts = ctx.needs_input_grad
        ctx.layout = experts.shape, experts.stride()
        ctx.save_for_backward(lines if of_experts else None, experts if of_lines else None)
        return lines.new_empty(len(lines), experts.shape[-1])

    @staticmethod
    # pyrefly: ignore[bad-override]  # there is one output
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return tensors of the shapes of the gradients, None for what is frozen."""
        lines, experts = ctx.saved_tensors
        of_lines = of_experts = None
        if experts is not None:
            of_lines = gradient.new_empty(len(gradient), experts.shape[1])
        if lines is not None:
            # As torch's product returns it. In another layout autograd would copy it.
            of_experts = gradient.new_empty_strided(*ctx.layout)
        return of_lines, of_experts


@contextlib.contextmanager
def libraries_that_take_fakes(plan: Plan, batch: Batch) -> Generator[None]:
    """Have other libraries accept fake tensors, of which nobody can read a value.

    transformers reads from the values of positions whether rows share a line, and torch's grouped
    product takes fake tensors only in bf16. sdpa is the kernel that GPUs choose, where it can be.
    """
    moe: Any = importlib.import_module("transformers.integrations.moe")
    multiply = moe._grouped_mm

    def multiply_in_any_precision(lines: Any, experts: Any, offs: Any) -> torch.Tensor:
        if experts.dtype == torch.bfloat16:
            return multiply(lines, experts, offs=offs)
        return GroupedProduct.apply(lines.to(experts.dtype), experts)

    def find_packed(position_ids: torch.Tensor) -> torch.Tensor | None:
        return torch.zeros_like(position_ids) if batch.is_packed else None

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(mock.patch.object(moe, "_grouped_mm", multiply_in_any_precision))
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
