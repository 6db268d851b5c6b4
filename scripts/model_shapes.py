"""A model as its config describes it, on the meta device: every tensor has its shape, none has its bytes.

`build` makes what the recipe's `load_model` would make, adapters and quantized layers included, from a config alone.
"""

import contextlib
import json
import math
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.quantizers.base import get_keys_to_not_convert

BLOCK = 64  # weights that share a scale; bitsandbytes' default
BLOCK_OF_SCALES = 256  # scales that share one in double quantization
NO_HUB = 69


class Unplannable(Exception):
    """What cannot be planned: one line for the user, and the exit code."""

    def __init__(self, message, code=64):
        super().__init__(message)
        self.code = code


def read_config(name):
    """Return the transformers config of a hub id, a folder or a config.json.

    Raises Unplannable: with 69 where the hub cannot be reached, with 64 for a file that is no config of a known model.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    try:
        if path.is_file():
            content = json.loads(path.read_text())
            if "model_type" not in content:
                raise Unplannable(
                    f"{path}: no field model_type, from which transformers knows the architecture"
                )
            return AutoConfig.for_model(**content)
        if name.endswith(".json") or name.startswith((".", "/")):
            raise Unplannable(
                f"{path}: no such file; MODEL is a hub id, a folder with a config.json, or a config.json"
            )
        return AutoConfig.from_pretrained(name, trust_remote_code=False)
    except Unplannable:
        raise
    except OSError as error:
        raise Unplannable(
            f"{name}: not a folder, and the hub has or gives no such config: {first_line(error)}",
            NO_HUB,
        ) from None
    except Exception as error:  # each config class checks its own fields, in its own way
        raise Unplannable(
            f"{name}: not the config of a model that transformers knows: {first_line(error)}"
        ) from None


def first_line(error):
    """The first line of an error's text, at most 200 characters."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class Quantized(torch.nn.Linear):
    """A linear layer as bitsandbytes stores it, frozen: packed weight, scales as buffers.

    4-bit: two weights a byte, in elements of the storage dtype, as the recipe asks for; an fp32 scale a block of 64,
    or, with double quantization, a byte a block and an fp32 scale for 256 of those (arXiv 2305.14314).
    int8: a byte a weight, an fp32 scale a row (arXiv 2208.07339).
    """

    def __init__(self, linear, args):
        super().__init__(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            dtype=linear.weight.dtype,
        )
        self.in_4bit, size, self.computes_in = (
            args.load_in_4bit,
            linear.weight.numel(),
            linear.weight.dtype,
        )
        blocks = math.ceil(size / BLOCK)
        if not self.in_4bit:
            weight, scales = (
                torch.empty(linear.weight.shape, dtype=torch.int8),
                [torch.empty(linear.out_features)],
            )
        else:
            weight = torch.empty(
                math.ceil(size / 2 / linear.weight.element_size()), 1, dtype=linear.weight.dtype
            )
            scales = [torch.empty(blocks)]
            if args.bnb_4bit_use_double_quant:
                scales = [
                    torch.empty(blocks, dtype=torch.uint8),
                    torch.empty(math.ceil(blocks / BLOCK_OF_SCALES)),
                    torch.empty(256),
                ]
            scales.append(torch.empty(16))  # the values that four bits stand for
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        for i, scale in enumerate(scales):
            self.register_buffer(f"scale_{i}", scale, persistent=False)
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def forward(self, x):
        out = QuantizedProduct.apply(x, self)
        return out.clone() if self.in_4bit else out  # peft clones it


class QuantizedProduct(torch.autograd.Function):
    """What bitsandbytes' products allocate: 4-bit keeps nothing of its input, int8 all of it, in int8 besides."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        if not layer.in_4bit:
            ctx.kept = x
            _ = torch.empty_like(x, dtype=torch.float16), torch.empty_like(x, dtype=torch.int8)
        return x.new_empty(*x.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx, grad):
        layer = ctx.layer
        whole = grad.new_empty(layer.out_features, layer.in_features)  # dequantized
        return grad.matmul(whole), None


def quantize(model, args):
    """Put Quantized layers where transformers would let bitsandbytes put its own."""
    kept = get_keys_to_not_convert(model)
    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and not any(
            name == key or name.endswith(f".{key}") for key in kept
        ):
            model.set_submodule(name, Quantized(module, args))
    for weight in model.parameters():
        weight.requires_grad_(False)


def build(args, config, device="meta"):
    """Return the recipe's model, by default on the meta device: dtype, adapters and quantized layers as `args`, the
    recipe's, say.

    Attention is always sdpa, since kernels for GPUs refuse to be built elsewhere; parameters do not depend on it.
    """
    try:
        with torch.device(device), quiet():
            dtype = getattr(torch, args.dtype)
            eager = args.attn_implementation == "eager"
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype, attn_implementation="eager" if eager else "sdpa"
            )
            if args.load_in_4bit or args.load_in_8bit:
                quantize(model, args)
            if args.use_peft:
                model = get_peft_model(
                    model,
                    LoraConfig(
                        task_type="CAUSAL_LM",
                        r=args.lora_r,
                        lora_alpha=args.lora_alpha,
                        lora_dropout=args.lora_dropout,
                        use_rslora=args.use_rslora,
                        use_dora=args.use_dora,
                        target_modules="all-linear"
                        if args.lora_target_modules == ["all-linear"]
                        else args.lora_target_modules,
                    ),
                )
    except (
        Exception
    ) as error:  # whatever a model class or peft makes of a config that does not fit it
        raise Unplannable(
            f"no causal language model from this config: {type(error).__name__}: {first_line(error)}"
        ) from None
    return model.train()


@contextlib.contextmanager
def quiet():
    """No reports of libraries about weights that are not there."""
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
    transformers.logging.set_verbosity(level)
