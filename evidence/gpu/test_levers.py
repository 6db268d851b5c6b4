# SPDX-License-Identifier: Apache-2.0
"""Where the time of an 8B step goes on one GPU, and what each lever brings, with plain torch.

A lever is measured on six layers of Llama 3 8B's shape with random weights, since the cost of a
layer does not depend on their number: forward and backward of rows of 4,096 tokens. The floor is
the time of a layer's matrix products and attention alone, each at the speed measured here. The last
rows are whole steps of all 32 layers with head, loss and optimizer. --dry runs what needs no
compiler on tiny models.
"""

import gc
import statistics
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy as Policy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from contestants import SMALL
from gpu.test_side_by_side import LLAMA_8B, PEAK_FLOPS

LAYERS = 6
ROWS = 2
FP8_MAX = 448.0  # of float8_e4m3fn
# {what: (compiled, recomputed)}; "selective" keeps the results of products and attention
FULL = {
    "eager": (False, ""),
    "recomputed": (False, "all"),
    "recomputed, compiled": (True, "all"),
    "compiled": (True, ""),
    "selective": (False, "selective"),
    "selective, compiled": (True, "selective"),
}
# The same of LoRA, whose base is in float8 where the name says so
LORA = {
    "peft, eager": (False, ""),
    "peft, compiled": (True, ""),
    "peft, compiled, recomputed": (True, "all"),
    "float8 base, compiled": (True, ""),
}
# Whole steps: (rows, compiled, recomputed)
WHOLE = {
    "8B full, recomputed, 4 rows": (4, False, "all"),
    "8B full, recomputed, compiled, 4 rows": (4, True, "all"),
    "8B full, selective, compiled, 4 rows": (4, True, "selective"),
    "8B full, selective, compiled, 2 rows": (2, True, "selective"),
}


class Shape:
    """A device, and the sizes of what is measured on it."""

    def __init__(self, on_gpu):
        self.on_gpu = on_gpu
        self.device = "cuda"
        self.config = LLAMA_8B
        self.length = 4096
        self.repeats = 6
        if not on_gpu:
            self.device = "cpu"
            self.config = LLAMA_8B | SMALL
            self.length = 32
            self.repeats = 2

    def random(self, *sizes, **options):
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16, **options)

    def milliseconds(self, work):
        """The median time of calling `work`, with the device's work."""
        times = []
        for number in range(self.repeats + 3):
            begun = time.perf_counter()
            work()
            if self.on_gpu:
                torch.cuda.synchronize()
            if number >= 3:  # after the warm-up, and after compiling
                times.append(1e3 * (time.perf_counter() - begun))
        return statistics.median(times)

    def fresh(self):
        """Forget what was compiled and measured before."""
        gc.collect()
        torch._dynamo.reset()
        if self.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak(self):
        """{the most GiB of tensors since then}, {} on a CPU."""
        if not self.on_gpu:
            return {}
        return {"peak GiB": round(torch.cuda.max_memory_allocated() / 2**30, 2)}


@pytest.mark.whole
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_levers(kind, cell):
    claim = "what compiling and recomputation bring to full training of 8B"
    levers = FULL
    whole = WHOLE
    if kind == "lora":
        claim = "what compiling and a float8 base bring to LoRA of 8B"
        levers = LORA
        whole = {}
    cell.proves(f"levers.{kind}", claim)
    shape = Shape(cell.on_gpu)
    if not cell.on_gpu:  # where compiling takes minutes
        levers = {what: pulled for what, pulled in levers.items() if not pulled[0]}
        whole = {what: pulled for what, pulled in whole.items() if not pulled[1]}
    floor = floors(shape)[kind]
    cell.rows.append({"what": "floor", "ms a layer": round(floor, 2)})
    for what, pulled in levers.items():
        shape.fresh()
        model = decoder(shape, LAYERS)
        if kind == "lora":
            model = in_float8(model) if what.startswith("float8") else with_peft(model)
        cell.rows.append({"what": what} | measure(shape, model, pulled, floor))
        del model
    for what, options in whole.items():
        shape.fresh()
        cell.rows.append({"what": what} | whole_step(shape, *options))
    shape.fresh()  # the next cells need the memory


# ---- Measuring ----
def floors(shape):
    """Milliseconds of a layer's products and attention; LoRA's frozen base has no gradients."""
    config = shape.config
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head = hidden // config["num_attention_heads"]
    kv = head * config["num_key_value_heads"]
    tokens = ROWS * shape.length
    sizes = [(hidden, hidden), (hidden, 2 * kv), (hidden, hidden)]
    sizes += [(hidden, 2 * inner), (inner, hidden)]
    full = lora = 0.0
    for inputs, outputs in sizes:
        given, weight = shape.random(tokens, inputs), shape.random(outputs, inputs)
        gradient = shape.random(tokens, outputs)
        lora += shape.milliseconds(partial(torch.mm, given, weight.t()))
        lora += shape.milliseconds(partial(torch.mm, gradient, weight))
        full += shape.milliseconds(partial(torch.mm, gradient.t(), given))
    heads = (config["num_attention_heads"], *[config["num_key_value_heads"]] * 2)
    parts = [shape.random(ROWS, n, shape.length, head, requires_grad=True) for n in heads]

    def attention():
        out = scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        torch.autograd.grad(out, parts, torch.ones_like(out))

    lora += shape.milliseconds(attention)
    return {"full": full + lora, "lora": lora}


def measure(shape, model, levers, floor):
    """Milliseconds of a layer, forward and backward, and the share that the floor is."""
    layers = pull(model, *levers)
    sizes = (ROWS, shape.length, shape.config["hidden_size"])
    hidden = shape.random(*sizes, requires_grad=True)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    is_mixed = trained[0].dtype == torch.float32  # as adapters are

    def step():
        with torch.autocast(shape.device, torch.bfloat16, enabled=is_mixed):
            out = decoder_of(model)(inputs_embeds=hidden, use_cache=False).last_hidden_state
        out.float().square().mean().backward()
        for weight in [*trained, hidden]:
            weight.grad = None

    each = shape.milliseconds(step) / len(layers)
    return {"ms a layer": round(each, 2), "of the floor": round(floor / each, 2)} | shape.peak()


def decoder_of(model):
    """The layers and what is around them, without the head, also inside of peft's model."""
    return model.get_decoder()


def pull(model, compiled, recomputed):
    """Compile each layer, and recompute what it is asked to; returns the layers."""
    aten = torch.ops.aten
    kept = {
        aten.mm.default,
        aten._scaled_mm.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }

    def policy(_, operator, *args, **options):
        return Policy.MUST_SAVE if operator in kept else Policy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if recomputed == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    layers = decoder_of(model).layers
    for layer in layers:
        if recomputed:
            layer.forward = partial(checkpoint, layer.forward, **options)
        if compiled:
            layer.compile()
    return layers


def decoder(shape, layers, vocabulary=512):
    """A Llama of random bf16 weights with so many layers."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"num_hidden_layers": layers, "vocab_size": vocabulary}
    config = LlamaConfig(**shape.config | sizes)
    with torch.device(shape.device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()


def whole_step(shape, rows, compiled, recomputed):
    """Tokens per second and the share of the peak, of steps with loss and fused AdamW."""
    config = shape.config
    vocabulary = config["vocab_size"]
    hidden_size = config["hidden_size"]
    model = decoder(shape, config["num_hidden_layers"], vocabulary)
    layers = pull(model, compiled, recomputed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(0, vocabulary, (rows, shape.length), device=shape.device)

    def loss_of(hidden, weight):
        return cross_entropy((hidden.flatten(0, 1) @ weight.t()).float(), ids.flatten())

    if compiled:
        loss_of = torch.compile(loss_of)

    def step():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        loss_of(hidden, model.lm_head.weight).backward()
        optimizer.step()
        optimizer.zero_grad()

    rate = rows * shape.length / shape.milliseconds(step) * 1e3
    weights = sum(weight.numel() for weight in model.parameters()) - vocabulary * hidden_size
    flops = 6 * weights + 12 * len(layers) * hidden_size * shape.length
    mfu = round(rate * flops / PEAK_FLOPS, 3)
    return {"tokens/s": round(rate), "MFU": mfu} | shape.peak()


# ---- Adapters ----
def with_peft(model):
    """The model with peft's LoRA of rank 16 on all linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))


def in_float8(model):
    """The same with `Float8Lora` in place of peft's layers."""
    model.requires_grad_(False)
    for layer in model.base_model.layers:
        for parent in (layer.self_attn, layer.mlp):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, Float8Lora(child))
    return model


class Float8Lora(nn.Module):
    """LoRA of rank 16, in fp32, on a frozen base in float8 with a scale for each row."""

    def __init__(self, base):
        super().__init__()
        weight = base.weight.data
        self.down = nn.Parameter(torch.randn(16, base.in_features, device=weight.device) / 64)
        self.up = nn.Parameter(torch.zeros(base.out_features, 16, device=weight.device))
        # The backward pass multiplies with the transposed weights, whose rows have other scales
        parts = [*to_float8(weight), *to_float8(weight.t().contiguous())]
        for number, part in enumerate(parts):
            self.register_buffer(f"part{number}", part)

    def forward(self, given):
        update = given @ self.down.to(given.dtype).t() @ (2 * self.up).to(given.dtype).t()
        return Float8.apply(given, *self.buffers()) + update


def to_float8(matrix):
    """A matrix in float8 with a scale for each of its rows."""
    scale = matrix.abs().amax(dim=1, keepdim=True).float().clamp(min=1e-8) / FP8_MAX
    return (matrix / scale).to(torch.float8_e4m3fn), scale


def multiply(given, weight, scale):
    """given @ weight.t() in float8, row by row, for a weight in float8."""
    rows, scales = to_float8(given.flatten(0, -2))
    options = {"scale_a": scales, "scale_b": scale.t(), "out_dtype": torch.bfloat16}
    out = torch._scaled_mm(rows, weight.t(), **options)
    return out.view(*given.shape[:-1], -1)


class Float8(torch.autograd.Function):
    """A product with a frozen float8 weight, and the gradient of its input."""

    @staticmethod
    def forward(ctx, given, weight, scale, transposed, scale_of_transposed):
        ctx.save_for_backward(transposed, scale_of_transposed)
        return multiply(given, weight, scale)

    @staticmethod
    def backward(ctx, *gradients):
        return multiply(gradients[0], *ctx.saved_tensors), None, None, None, None
