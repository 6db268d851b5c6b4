"""Cells of a second or two, each about one property that the recipes rely on.

It is a property of a kernel, of torch or of another library.
"""

import inspect
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from . import machine
from .cell import ROOT, Outcome
from .timing import milliseconds, synchronize

ANGLE_BOUND = 1e-2  # rad: a position rounded to TF32 is off by up to 1.5
# Relative error of the head's gradient against fp32; one bf16 rounding is 3e-3
GRADIENT_BOUND = 5e-3
BF16_ATTENTION_BOUND = 2e-2  # outputs are of size 1 and below
CONTEXT_ASSUMED_MIB = 819  # scripts/planner/cards.py CONTEXT


def tf32_positions(setup):
    """Rotary angles by a matrix product, as transformers 5.17 computes them, under --tf32."""
    torch.set_float32_matmul_precision("high")
    positions = torch.arange(8192.0, device=setup.device)
    frequencies = torch.linspace(1e-4, 1, 64, device=setup.device)
    column = frequencies[None, :, None]
    row = positions[None, None]
    by_product = column @ row
    by_element = column * row
    error = (by_product - by_element).abs().max().item()
    torch.set_float32_matmul_precision("highest")
    return Outcome([{"largest error of an angle, rad": error}], error <= ANGLE_BOUND)


def pinned_answer(setup):
    """A copy to the host without waiting lands in pinned memory, as stop_asked assumes."""
    answer = torch.ones((), device=setup.device)
    pinned = answer.to("cpu", non_blocking=True).is_pinned()
    return Outcome([{"the copy is in pinned memory": pinned}], pinned)


def found_inf(setup):
    """Fused AdamW leaves a step out when found_inf is 1, and takes and counts it when it is 0."""
    weight = torch.nn.Parameter(torch.ones(8, device=setup.device))
    optimizer = torch.optim.AdamW([weight], fused=True)
    weight.grad = torch.ones_like(weight)
    optimizer.grad_scale = None
    optimizer.found_inf = torch.ones((), device=setup.device)
    optimizer.step()
    left_out = bool((weight == 1).all())
    optimizer.found_inf = torch.zeros((), device=setup.device)
    optimizer.step()
    stepped = bool((weight != 1).any())
    counted = optimizer.state[weight]["step"].item()
    row = {"left out": left_out, "then stepped": stepped, "steps counted": counted}
    return Outcome([row], left_out and stepped and counted == 1)


@dataclass(frozen=True)
class PackedShape:
    """One line of packed rows of equal length, and the heads that attend to it."""

    length: int  # tokens of the line
    rows: int
    heads: int
    kv_heads: int
    width: int  # of a head


PACKED = PackedShape(length=4096, rows=16, heads=32, kv_heads=8, width=128)
TINY_PACKED = PackedShape(length=256, rows=4, heads=4, kv_heads=2, width=16)


def packed_attention(setup):
    """Attention kernels agree on a line of 4,096 tokens that holds 16 rows; and their speed."""
    shape = TINY_PACKED if setup.tiny else PACKED
    length = shape.length
    options = {
        "dtype": torch.bfloat16 if setup.device == "cuda" else torch.float32,
        "device": setup.device,
        "requires_grad": True,
    }
    query = torch.randn(1, shape.heads, length, shape.width, **options)
    key = torch.randn(1, shape.kv_heads, length, shape.width, **options)
    value = torch.randn(1, shape.kv_heads, length, shape.width, **options)
    owner = torch.arange(length, device=setup.device) // (length // shape.rows)
    kernels = attention_kernels(setup, query, key, value, owner, shape.rows)
    with torch.no_grad():
        wanted = kernels["sdpa, dense mask"]().float()
    outcome = Outcome(ok=True)
    for name, kernel in kernels.items():
        row = measure_attention(setup, name, kernel, wanted)
        difference = row.get("from the dense mask")
        if difference is not None and "alone" not in name:
            outcome.ok = outcome.ok and difference <= BF16_ATTENTION_BOUND
        outcome.rows.append(row)
        setup.keep(outcome)
    return outcome


def attention_kernels(setup, query, key, value, owner, rows):
    """Return {name: function without arguments}, each of which attends over the packed rows.

    query: [1, heads, tokens, width]. key, value: the same with fewer heads. owner: [tokens], the
    row of each token. rows: how many there are.
    """
    from torch.nn.functional import scaled_dot_product_attention

    groups = query.shape[1] // key.shape[1]
    places = torch.arange(query.shape[2], device=setup.device)
    same_row = owner[:, None] == owner
    before = places[:, None] >= places
    mask = (same_row & before)[None, None]

    def dense():
        keys = key.repeat_interleave(groups, 1)
        values = value.repeat_interleave(groups, 1)
        return scaled_dot_product_attention(query, keys, values, attn_mask=mask)

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
    """Return flex_attention, compiled, with a block mask of the rows."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def sees(batch, head, i, j):
        return (owner[i] == owner[j]) & (i >= j)

    length = query.shape[2]
    block_mask = create_block_mask(sees, 1, None, length, length, device=query.device)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=block_mask, enable_gqa=True)


def flat(tensor):
    """Return [1, heads, tokens, width] as [tokens, heads, width]."""
    return tensor[0].transpose(0, 1)


def ends_of(query, rows):
    """Return (where each row begins, and the end, int32, [rows + 1]; tokens of a row)."""
    length = query.shape[2]
    longest = length // rows
    ends = torch.arange(0, length + 1, longest, device=query.device, dtype=torch.int32)
    return ends, longest


def varlen_kernel(query, key, value, rows):
    """Return torch's FlashAttention without a package, None where torch does not have it.

    It is torch.nn.attention.varlen.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    groups = query.shape[1] // key.shape[1]
    ends, longest = ends_of(query, rows)
    line = (ends, ends, longest, longest)
    options = {"window_size": (-1, 0)}  # causal: no bound on the left, nothing on the right
    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    if takes_groups:
        options["enable_gqa"] = True

    def varlen():
        keys = flat(key)
        values = flat(value)
        if not takes_groups:
            keys = keys.repeat_interleave(groups, 1)
            values = values.repeat_interleave(groups, 1)
        out = varlen_attn(flat(query), keys, values, *line, **options)
        return out.transpose(0, 1)[None]

    return varlen


def flash_kernel(query, key, value, rows):
    """Return flash-attn's own varlen function."""
    from flash_attn import flash_attn_varlen_func

    ends, longest = ends_of(query, rows)
    line = (ends, ends, longest, longest)

    def flash():
        out = flash_attn_varlen_func(flat(query), flat(key), flat(value), *line, causal=True)
        return out.transpose(0, 1)[None]

    return flash


def measure_attention(setup, name, kernel, wanted):
    """Return one row: milliseconds forward and with the backward pass, and how far it is off.

    wanted: the output of the reference.
    """
    try:
        with torch.no_grad():
            difference = (kernel().float() - wanted).abs().max().item()
            forward = milliseconds(kernel, setup.device)
        both = milliseconds(lambda: kernel().sum().backward(), setup.device)
    except Exception as error:
        # A kernel that this GPU or version lacks is a finding, and the others still count
        first_line = str(error).splitlines()[0]
        return {"attention": name, "result": f"{type(error).__name__}: {first_line[:200]}"}
    return {
        "attention": name,
        "result": "ran",
        "forward, ms": round(forward, 3),
        "with backward, ms": round(both, 3),
        "from the dense mask": difference,
    }


def lora_cast(setup):
    """LoRA under autocast, with peft's cast of its input and without: as right, and faster."""
    tokens = 32 if setup.tiny else 8192
    layer = lora_layer(setup)
    base = layer.get_base_layer()
    shape = (1, tokens, base.in_features)
    hidden = torch.randn(shape, device=setup.device, dtype=torch.bfloat16, requires_grad=True)

    def step():
        with torch.autocast(setup.device, torch.bfloat16):
            out = layer(hidden)
        out.sum().backward()

    outcome = Outcome()
    base_ms = milliseconds(lambda: base(hidden).sum().backward(), setup.device)
    outcome.rows.append({"what": "base alone", "ms": base_ms})
    gradients = []
    for cast in (True, False):
        layer.cast_input_dtype_enabled = cast
        layer.zero_grad()
        step()
        trained = [weight for weight in layer.parameters() if weight.grad is not None]
        gradients.append([weight.grad.clone() for weight in trained])
        name = "as peft has it" if cast else "without the cast"
        outcome.rows.append({"what": name, "ms": milliseconds(step, setup.device)})
    with_cast, without_cast = gradients
    pairs = zip(with_cast, without_cast, strict=True)
    largest = max(distance(gradient, reference) for reference, gradient in pairs)
    outcome.rows.append({"what": "gradients differ, relative", "largest": largest})
    outcome.ok = largest <= GRADIENT_BOUND
    return outcome


def lora_layer(setup):
    """Return peft's LoRA of rank 16 on a frozen bf16 layer, both of its parts in fp32."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear

    inputs, outputs = (64, 128) if setup.tiny else (4096, 14336)
    base = torch.nn.Linear(inputs, outputs, bias=False, device=setup.device, dtype=torch.bfloat16)
    base.requires_grad_(False)
    layer = Linear(base, "default", config=LoraConfig(r=16), r=16, lora_alpha=32)
    layer = layer.to(setup.device)
    layer.lora_A.float()
    layer.lora_B.float()
    # B is zero at first, which would hide a difference
    torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.02)
    return layer


def distance(tensor, reference):
    """Return the norm of the difference of two tensors, relative to the reference's."""
    return ((tensor - reference).norm() / reference.norm()).item()


class HeadOnly(torch.nn.Module):
    """The least that loss_in_head of the recipe takes for a model: a head behind nothing."""

    def __init__(self, head, vocabulary):
        super().__init__()
        self.base_model = torch.nn.Identity()
        self.lm_head = head
        self.embedding = SimpleNamespace(num_embeddings=vocabulary)

    def forward(self, input_ids=None):
        hidden = self.base_model(input_ids).last_hidden_state
        return SimpleNamespace(logits=self.lm_head(hidden))

    def get_output_embeddings(self):
        return self.lm_head

    def get_input_embeddings(self):
        return self.embedding


def head_in_pieces(setup):
    """The recipe's loss in pieces keeps the head's gradient of fp32; and its time."""
    vocabulary, width, tokens = (512, 64, 256) if setup.tiny else (128256, 4096, 8192)
    hidden = torch.randn(1, tokens, width, device=setup.device) / 8
    targets = torch.randint(vocabulary, (tokens,), device=setup.device)
    outcome = Outcome(ok=True)
    reference = None
    for pieces, autocast in ((1, False), (1, True), (4, True), (16, True)):
        head = head_with_loss(setup, vocabulary, width, targets, pieces)
        leaf = hidden.clone().requires_grad_()
        step = partial(head_step, setup, head, leaf, tokens, autocast)
        if autocast:
            ms = milliseconds(step, setup.device, repeats=3, warmup=1)
        else:
            ms = None
            step()
        gradient = head.weight.grad.float()
        if reference is None:
            reference = gradient.clone()
        error = distance(gradient, reference)
        row = {
            "pieces": pieces,
            "precision": "bf16" if autocast else "fp32",
            "ms": ms,
            "error of the head's gradient": error,
        }
        outcome.rows.append(row)
        outcome.ok = outcome.ok and error <= GRADIENT_BOUND
        setup.keep(outcome)
        del step, head, leaf, gradient  # their memory is given back before the next case
        if setup.device == "cuda":
            torch.cuda.empty_cache()
    return outcome


def head_with_loss(setup, vocabulary, width, targets, pieces):
    """Return a head whose forward pass is the recipe's loss, in so many pieces."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import llama

    torch.manual_seed(0)
    head = torch.nn.Linear(width, vocabulary, bias=False, device=setup.device)
    torch.nn.init.normal_(head.weight, std=0.02)
    tokens = len(targets)
    logits_mib = tokens * vocabulary * 4 / 2**20
    llama.loss_in_head(HeadOnly(head, vocabulary), logits_mib / pieces)
    positions = torch.arange(tokens, device=setup.device)
    llama.SUPERVISED.update(positions=positions, targets=targets)
    return head


def head_step(setup, head, hidden, tokens, autocast):
    """Do one forward and backward pass through the head, with a fresh gradient."""
    head.weight.grad = None
    with torch.autocast(setup.device, torch.bfloat16, enabled=autocast):
        loss = head.forward(hidden).sum()
    (loss / tokens).backward()


def context_size(setup):
    """What a process takes of the GPU besides its tensors is within the planner's assumption.

    It is CUDA's context and the kernels that it has loaded.
    """
    before = machine.gpu_memory_used()
    matrix = torch.randn(256, 256, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.softmax(matrix @ matrix, -1).sum().backward()
    synchronize(setup.device)
    used = machine.gpu_memory_used() - before
    context = used - torch.cuda.memory_reserved() / 2**20
    row = {"context, MiB": context, "assumed by the planner, MiB": CONTEXT_ASSUMED_MIB}
    return Outcome([row], context <= CONTEXT_ASSUMED_MIB)


def int8_rows(setup):
    """How far the int8 product of a row depends on its neighbors, and what it costs."""
    import bitsandbytes

    width, rows = (128, 8) if setup.tiny else (4096, 64)
    dtype = torch.bfloat16 if setup.device == "cuda" else torch.float32
    layer = bitsandbytes.nn.Linear8bitLt(
        width, width, bias=False, has_fp16_weights=False, threshold=6.0
    )
    weights = (torch.randn(width, width) * 0.02).half()
    layer.weight = bitsandbytes.nn.Int8Params(weights, requires_grad=False, has_fp16_weights=False)
    layer = layer.to(setup.device)
    hidden = torch.randn(1, rows, width, device=setup.device)
    hidden = hidden.clamp(-5, 5).to(dtype)
    hidden[0, -1, 3] = 9.0  # above the threshold: its column is an outlier's for all rows
    with torch.no_grad():
        beside_outlier = layer(hidden)[:, :-1]
        without_outlier = layer(hidden[:, :-1])
        difference = (beside_outlier - without_outlier).abs().max().item()
        ms = milliseconds(lambda: layer(hidden), setup.device)
    row = {
        "a row alone and beside an outlier differ by": difference,
        f"ms a product of {rows} rows": ms,
    }
    return Outcome([row])
