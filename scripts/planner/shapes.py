# SPDX-License-Identifier: Apache-2.0
"""A model as its config describes it, on the meta device: tensors have shapes, but no bytes.

`build_base` makes what the recipe's `load_model` would load, quantized layers included, from only a
config; `build` adds the adapters.
"""

import contextlib
import json
import math
import os
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert

from common import Exit, find_missing

from .errors import UnplannableError, first_line
from .recipe import (
    RecipeArguments,
    problems_of_whole_modules,
    split_over_ranks,
    with_adapters,
)

# bitsandbytes' block sizes
WEIGHTS_PER_SCALE = 64
SCALES_PER_SCALE = 256  # in double quantization


# ---- Configs ----
def read_model_config(name: str, revision: str = "main") -> PretrainedConfig:
    """Return the transformers config of a hub id, a folder or a config.json.

    Raises UnplannableError: with 69 if the hub cannot be reached, with 64 for a file that is not
    the config of a known model.
    """
    try:
        return find_model_config(name, revision)
    except UnplannableError:
        raise
    except OSError as error:
        raise UnplannableError(
            f"{name}: not a folder, and the hub does not provide its config: {first_line(error)}",
            Exit.NO_HUB,
        ) from None
    except Exception as error:  # Each config class checks its own fields in its own way.
        raise UnplannableError(
            f"{name}: not the config of a model that transformers knows: {first_line(error)}"
        ) from None


def find_model_config(name: str, revision: str) -> PretrainedConfig:
    """Return the config of a model. Raises whatever transformers raises."""
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        content = json.loads(path.read_text())
        if "model_type" not in content:
            raise UnplannableError(
                f"{path}: no field model_type, which names the architecture for transformers"
            )
        return AutoConfig.for_model(**content)
    missing = find_missing(name)
    if path.suffix == ".json":
        missing = f"{path}: no such file"
    if missing is not None:
        raise UnplannableError(
            f"{missing}; MODEL is a hub id, a folder with a config.json, or a config.json"
        )
    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)


# ---- Quantized layers ----
class Quantized(torch.nn.Linear):
    """A linear layer as bitsandbytes stores it, frozen: packed weight, scales as buffers.

    4-bit (arXiv 2305.14314): two weights per byte, in elements of the recipe's storage dtype. Each
    block of 64 weights has an fp32 scale: 4.5 bits per weight. With double
    quantization a scale takes one byte, and 256 of those share an fp32 scale: 4.127 bits.
    int8 (arXiv 2208.07339): one byte per weight, one fp32 scale per row.
    """

    def __init__(self, linear: torch.nn.Linear, args: RecipeArguments) -> None:
        super().__init__(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            dtype=linear.weight.dtype,
        )
        self.in_4bit = args.load_in_4bit
        if self.in_4bit:
            weight = packed_4bit(linear.weight)
            scales = scales_4bit(linear.weight.numel(), args.bnb_4bit_use_double_quant)
        else:
            weight = torch.empty(linear.weight.shape, dtype=torch.int8)
            scales = [torch.empty(linear.out_features)]
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        if self.in_4bit:
            # bitsandbytes' weights have such an attribute, by which the recipe recognizes them.
            self.weight.quant_state = None  # pyrefly: ignore[missing-attribute]
        for number, scale in enumerate(scales):
            self.register_buffer(f"scale_{number}", scale, persistent=False)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of the product, with meaningless values."""
        if not self.in_4bit:
            return QuantizedProduct.apply(input, self)
        computes_in = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            computes_in = torch.get_autocast_dtype(input.device.type)
        out = QuantizedProduct.apply(input.to(computes_in), self).to(input.dtype)
        return out.clone()  # as peft's 4-bit layer does


def packed_4bit(weight: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor of the bytes of a weight in 4 bits, [elements, 1]."""
    size = weight.numel() / 2
    return torch.empty(math.ceil(size / weight.element_size()), 1, dtype=weight.dtype)


def scales_4bit(numel: int, double_quant: bool) -> list[torch.Tensor]:
    """Return empty tensors of what bitsandbytes keeps besides `numel` weights in 4 bits."""
    code = torch.empty(16)  # the values that four bits stand for
    blocks = math.ceil(numel / WEIGHTS_PER_SCALE)
    if not double_quant:
        return [torch.empty(blocks), code]
    byte_scales = torch.empty(blocks, dtype=torch.uint8)
    scales_of_scales = torch.empty(math.ceil(blocks / SCALES_PER_SCALE))
    byte_code = torch.empty(256)
    return [byte_scales, scales_of_scales, byte_code, code]


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


def quantize(model: torch.nn.Module, args: RecipeArguments) -> None:
    """Replace linear layers with Quantized ones where transformers would quantize; freeze all."""
    kept = get_keys_to_not_convert(model)
    for name, module in list(model.named_modules()):
        is_kept = any(name == key or name.endswith(f".{key}") for key in kept)
        if type(module) is torch.nn.Linear and not is_kept:
            model.set_submodule(name, Quantized(module, args))
    for weight in model.parameters():
        weight.requires_grad_(False)


# ---- Models ----
def build_base(
    args: RecipeArguments, config: PretrainedConfig, device: str = "meta"
) -> PreTrainedModel:
    """Return the model that the recipe would load, without adapters, by default on the meta device.

    Attention is eager or sdpa, since models refuse GPU kernels on other devices; parameters do not
    depend on it. Raises UnplannableError for a config that is not of a causal language model.
    """
    with naming_bad_configs(), torch.device(device), quiet():
        return make_base(args, config).train()


def build(
    args: RecipeArguments, config: PretrainedConfig, accelerator: Any, device: str = "meta"
) -> PreTrainedModel:
    """Return this rank's part of what `build_base` makes, with the adapters of peft if requested.

    Only a traced plan needs this and peft, whose import takes seconds.

    accelerator: of the rank, or a stand-in.
    """
    model = build_base(args, config, device)
    with torch.device(device), quiet():
        split_over_ranks(model, accelerator)
    if not args.use_peft:
        return model
    refuse_whole_modules(model, args.modules_to_save)
    with naming_bad_configs(), torch.device(device), quiet():
        return with_adapters(model, args, accelerator).train()


def make_base(args: RecipeArguments, config: PretrainedConfig) -> PreTrainedModel:
    """Return the model on torch's current device. Raises whatever its class raises."""
    attention = args.attn_implementation
    if attention not in (None, "eager"):
        attention = "sdpa"  # Other kernels need a GPU; the weights are the same.
    model = AutoModelForCausalLM.from_config(
        config, dtype=getattr(torch, args.dtype), attn_implementation=attention
    )
    if args.load_in_4bit or args.load_in_8bit:
        quantize(model, args)
    return model


def refuse_whole_modules(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Raise UnplannableError if the recipe would refuse a name in --modules_to_save.

    model: without adapters.
    """
    problems = problems_of_whole_modules(model, names)
    if problems:
        raise UnplannableError("; ".join(problems))


class MemoizedBuild:
    """`build_base` on the meta device, called once for each kind of weights.

    A plan spends most of its time building the model. Its shapes depend on few arguments, and the
    closed form does not change it.
    """

    def __init__(self) -> None:
        self.built: dict[tuple, PreTrainedModel] = {}

    def __call__(self, args: RecipeArguments, config: PretrainedConfig) -> PreTrainedModel:
        """Return the model, which is built if it is not cached."""
        key = (
            id(config),
            args.dtype,
            args.attn_implementation,
            args.load_in_4bit,
            args.load_in_8bit,
            args.bnb_4bit_use_double_quant,
        )
        if key not in self.built:
            self.built[key] = build_base(args, config)
        return self.built[key]


def layers_of(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the decoder layers of a language model, or no layers if it has no ModuleList."""
    for module in model.base_model.children():
        if isinstance(module, torch.nn.ModuleList):
            return module
    return torch.nn.ModuleList()


@contextlib.contextmanager
def naming_bad_configs() -> Generator[None]:
    """Turn any error of a model class or of peft about a config into a one-line refusal."""
    try:
        yield
    except UnplannableError:
        raise
    except Exception as error:
        raise UnplannableError(
            f"this config does not make a causal language model: {type(error).__name__}: "
            f"{first_line(error)}"
        ) from None


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence what libraries print about missing weights."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            yield
    finally:
        transformers.logging.set_verbosity(level)
