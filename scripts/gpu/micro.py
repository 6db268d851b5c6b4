"""Cells of a second or two: one property of a kernel, of torch or of a library that the recipes
rely on.
"""

import inspect
import sys
from types import SimpleNamespace

import torch

from . import machine
from .cell import ROOT, Outcome
from .timing import milliseconds, synchronize

ANGLE_BOUND = 1e-2  # rad: a position rounded to TF32 is off by up to 1.5
GRADIENT_BOUND = (
    5e-3  # relative error of the head's gradient against fp32; one bf16 rounding is 3e-3
)
BF16_ATTENTION_BOUND = 2e-2  # outputs are of size 1 and below
CONTEXT_ASSUMED_MIB = 819  # scripts/memory_cards.py CONTEXT


def tf32_positions(setup):
    """Rotary angles by a matrix product, as transformers 5.17 computes them, under --tf32."""
    torch.set_float32_matmul_precision("high")
    positions = torch.arange(8192.0, device=setup.device)
    frequencies = torch.linspace(1e-4, 1, 64, device=setup.device)
    by_product = frequencies[None, :, None] @ positions[None, None]
    by_element = frequencies[None, :, None] * positions[None, None]
    error = (by_product - by_element).abs().max().item()
    torch.set_float32_matmul_precision("highest")
    return Outcome([{"largest error of an angle, rad": error}], error <= ANGLE_BOUND)


def pinned_answer(setup):
    """Whether a copy to the host without waiting lands in pinned memory, as stop_asked assumes."""
    pinned = torch.ones((), device=setup.device).to("cpu", non_blocking=True).is_pinned()
    return Outcome([{"the copy is in pinned memory": pinned}], pinned)


def found_inf(setup):
    """Fused AdamW leaves a step out when found_inf is 1, and takes and counts it when it is 0."""
    weight = torch.nn.Parameter(torch.ones(8, device=setup.device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.grad_scale, optimizer.found_inf = None, torch.ones((), device=setup.device)
    optimizer.step()
    left_out = bool((weight == 1).all())
    optimizer.found_inf = torch.zeros((), device=setup.device)
    optimizer.step()
    stepped, counted = bool((weight != 1).any()), optimizer.state[weight]["step"].item()
    row = {"left out": left_out, "then stepped": stepped, "steps counted": counted}
    return Outcome([row], left_out and stepped and counted == 1)


def packed_attention(setup):
    """Speed and agreement of attention kernels on one line of 4,096 tokens that holds 16 rows."""
    length, rows, heads, kv_heads, width = (
        (4096, 16, 32, 8, 128) if not setup.tiny else (256, 4, 4, 2, 16)
    )
    dtype = torch.bfloat16 if setup.device == "cuda" else torch.float32
    shape = {"dtype": dtype, "device": setup.device, "requires_grad": True}
    query = torch.randn(1, heads, length, width, **shape)
    key = torch.randn(1, kv_heads, length, width, **shape)
    value = torch.randn(1, kv_heads, length, width, **shape)
    owner = torch.arange(length, device=setup.device) // (length // rows)
    kernels = attention_kernels(setup, query, key, value, owner, rows)
    with torch.no_grad():
        wanted = kernels["sdpa, dense mask"]().float()
    outcome = Outcome(ok=True)
    for name, kernel in kernels.items():
        outcome.rows.append(measure_attention(setup, name, kernel, wanted))
        difference = outcome.rows[-1].get("from the dense mask")
        if difference is not None and "alone" not in name:
            outcome.ok = outcome.ok and difference <= BF16_ATTENTION_BOUND
        setup.keep(outcome)
    return outcome


def attention_kernels(setup, query, key, value, owner, rows):
    """Functions without arguments by name, each the attention of packed rows of one shape."""
    from torch.nn.functional import scaled_dot_product_attention

    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    at = torch.arange(length, device=setup.device)
    mask = ((owner[:, None] == owner) & (at[:, None] >= at))[None, None]

    def dense():
        repeated = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
        return scaled_dot_product_attention(query, *repeated, attn_mask=mask)

    def causal():
        return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    kernels = {"sdpa, dense mask": dense, "sdpa, causal alone, rows not kept apart": causal}
    if setup.device == "cuda":
        kernels["flex"] = flex_kernel(query, key, value, owner)
        varlen = varlen_kernel(query, key, value, rows)
        if varlen:
            kernels["torch's varlen"] = varlen
        if machine.version_of("flash-attn"):
            kernels["flash-attn, varlen"] = flash_kernel(query, key, value, rows)
    return kernels


def flex_kernel(query, key, value, owner):
    """flex_attention, compiled, with a block mask of the rows."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch, head, i, j):
        return (owner[i] == owner[j]) & (i >= j)

    length = query.shape[2]
    block_mask = create_block_mask(sees, 1, None, length, length, device=query.device)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=block_mask, enable_gqa=True)


def flat(tensor):
    """[1, heads, tokens, width] as [tokens, heads, width]."""
    return tensor[0].transpose(0, 1)


def varlen_kernel(query, key, value, rows):
    """torch.nn.attention.varlen, FlashAttention without a package; None where torch does not have
    it.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    length, groups = query.shape[2], query.shape[1] // key.shape[1]
    ends = torch.arange(0, length + 1, length // rows, device=query.device, dtype=torch.int32)
    gqa = "enable_gqa" in inspect.signature(varlen_attn).parameters

    def varlen():
        keys, values = flat(key), flat(value)
        more = {"enable_gqa": True}
        if not gqa:
            keys, values, more = (
                keys.repeat_interleave(groups, 1),
                values.repeat_interleave(groups, 1),
                {},
            )
        longest = length // rows
        out = varlen_attn(
            flat(query), keys, values, ends, ends, longest, longest, window_size=(-1, 0), **more
        )
        return out.transpose(0, 1)[None]

    return varlen


def flash_kernel(query, key, value, rows):
    """flash-attn's own varlen function."""
    from flash_attn import flash_attn_varlen_func

    length = query.shape[2]
    ends = torch.arange(0, length + 1, length // rows, device=query.device, dtype=torch.int32)
    longest = length // rows

    def flash():
        out = flash_attn_varlen_func(
            flat(query), flat(key), flat(value), ends, ends, longest, longest, causal=True
        )
        return out.transpose(0, 1)[None]

    return flash


def measure_attention(setup, name, kernel, wanted):
    """One row: milliseconds forward and with the backward pass, and the distance from what is
    wanted.
    """
    try:
        with torch.no_grad():
            distance = (kernel().float() - wanted).abs().max().item()
            forward = milliseconds(kernel, setup.device)
        both = milliseconds(lambda: kernel().sum().backward(), setup.device)
    except (
        Exception
    ) as error:  # a kernel that this GPU or version lacks is a finding, and the others still count
        return {
            "attention": name,
            "result": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}",
        }
    return {
        "attention": name,
        "result": "ran",
        "forward, ms": round(forward, 3),
        "with backward, ms": round(both, 3),
        "from the dense mask": distance,
    }


def lora_cast(setup):
    """A LoRA layer of a 16-bit base under autocast, with peft's cast of its input and without."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    inputs, outputs, tokens = (4096, 14336, 8192) if not setup.tiny else (64, 128, 32)
    base = torch.nn.Linear(inputs, outputs, bias=False, device=setup.device, dtype=torch.bfloat16)
    base.requires_grad_(False)
    layer = Linear(base, "default", config=LoraConfig(r=16), r=16, lora_alpha=32).to(setup.device)
    for part in (layer.lora_A, layer.lora_B):
        part.float()
    torch.nn.init.normal_(
        layer.lora_B["default"].weight, std=0.02
    )  # zero at first: it would hide a difference
    hidden = torch.randn(
        1, tokens, inputs, device=setup.device, dtype=torch.bfloat16, requires_grad=True
    )

    def step():
        with torch.autocast(setup.device, torch.bfloat16):
            out = layer(hidden)
        out.sum().backward()

    outcome, gradients = Outcome(), []
    outcome.rows.append(
        {
            "what": "base alone",
            "ms": milliseconds(lambda: base(hidden).sum().backward(), setup.device),
        }
    )
    for cast in (True, False):
        layer.cast_input_dtype_enabled = cast
        layer.zero_grad()
        step()
        gradients.append(
            [weight.grad.clone() for weight in layer.parameters() if weight.grad is not None]
        )
        name = "as peft has it" if cast else "without the cast"
        outcome.rows.append({"what": name, "ms": milliseconds(step, setup.device)})
    pairs = zip(*gradients, strict=True)
    largest = max(((a - b).norm() / a.norm()).item() for a, b in pairs)
    outcome.rows.append({"what": "gradients differ, relative", "largest": largest})
    outcome.ok = largest <= GRADIENT_BOUND
    return outcome


class HeadOnly(torch.nn.Module):
    """The least that loss_in_head of the recipe takes for a model: a head behind nothing."""

    def __init__(self, head, vocabulary):
        super().__init__()
        self.base_model, self.lm_head = torch.nn.Identity(), head
        self.embedding = SimpleNamespace(num_embeddings=vocabulary)

    def forward(self, input_ids=None):
        return SimpleNamespace(logits=self.lm_head(self.base_model(input_ids).last_hidden_state))

    def get_output_embeddings(self):
        return self.lm_head

    def get_input_embeddings(self):
        return self.embedding


def head_in_pieces(setup):
    """The recipe's loss in pieces: time of head and loss, and error of the head's gradient against
    fp32.
    """
    sys.path.insert(0, str(ROOT / "recipes"))
    import llama

    vocabulary, width, tokens = (128256, 4096, 8192) if not setup.tiny else (512, 64, 256)
    hidden = torch.randn(1, tokens, width, device=setup.device) / 8
    targets = torch.randint(vocabulary, (tokens,), device=setup.device)
    outcome, reference = Outcome(ok=True), None
    for pieces, autocast in ((1, False), (1, True), (4, True), (16, True)):
        torch.manual_seed(0)
        head = torch.nn.Linear(width, vocabulary, bias=False, device=setup.device)
        torch.nn.init.normal_(head.weight, std=0.02)
        llama.loss_in_head(HeadOnly(head, vocabulary), tokens / pieces * vocabulary * 4 / 2**20)
        llama.SUPERVISED.update(
            positions=torch.arange(tokens, device=setup.device), targets=targets
        )
        leaf = hidden.clone().requires_grad_()
        if autocast:
            ms = milliseconds(
                lambda h=head, x=leaf: head_step(setup, h, x, tokens, True), setup.device, 3, 1
            )
        else:
            ms = None
            head_step(setup, head, leaf, tokens, False)
        gradient = head.weight.grad.float()
        reference = gradient.clone() if reference is None else reference
        error = ((gradient - reference).norm() / reference.norm()).item()
        outcome.rows.append(
            {
                "pieces": pieces,
                "precision": "bf16" if autocast else "fp32",
                "ms": ms,
                "error of the head's gradient": error,
            }
        )
        outcome.ok = outcome.ok and error <= GRADIENT_BOUND
        setup.keep(outcome)
        del head, leaf, gradient
        if setup.device == "cuda":
            torch.cuda.empty_cache()
    return outcome


def head_step(setup, head, hidden, tokens, autocast):
    """One forward and backward pass through the head, with a fresh gradient."""
    head.weight.grad = None
    with torch.autocast(setup.device, torch.bfloat16, enabled=autocast):
        loss = head.forward(hidden).sum()
    (loss / tokens).backward()


def context_size(setup):
    """MiB of the GPU that one process takes besides its tensors: CUDA's context and the kernels it
    has loaded.
    """
    before = machine.gpu_memory_used()
    matrix = torch.randn(256, 256, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.softmax(matrix @ matrix, -1).sum().backward()
    synchronize(setup.device)
    used = machine.gpu_memory_used() - before
    reserved = torch.cuda.memory_reserved() / 2**20
    row = {"context, MiB": used - reserved, "assumed by the planner, MiB": CONTEXT_ASSUMED_MIB}
    return Outcome([row], used - reserved <= CONTEXT_ASSUMED_MIB)


def int8_rows(setup):
    """Whether the int8 product of a row depends on its neighbors, and what it costs."""
    import bitsandbytes

    width, rows = (4096, 64) if not setup.tiny else (128, 8)
    dtype = torch.bfloat16 if setup.device == "cuda" else torch.float32
    layer = bitsandbytes.nn.Linear8bitLt(
        width, width, bias=False, has_fp16_weights=False, threshold=6.0
    )
    weights = (torch.randn(width, width) * 0.02).half()
    layer.weight = bitsandbytes.nn.Int8Params(weights, requires_grad=False, has_fp16_weights=False)
    layer = layer.to(setup.device)
    hidden = torch.randn(1, rows, width, device=setup.device).clamp(-5, 5).to(dtype)
    hidden[0, -1, 3] = 9.0  # above the threshold: its column is an outlier's for all rows
    with torch.no_grad():
        difference = (layer(hidden)[:, :-1] - layer(hidden[:, :-1])).abs().max().item()
        ms = milliseconds(lambda: layer(hidden), setup.device)
    return Outcome(
        [
            {
                "a row alone and beside an outlier differ by": difference,
                f"ms a product of {rows} rows": ms,
            }
        ]
    )
