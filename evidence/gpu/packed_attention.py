# SPDX-License-Identifier: Apache-2.0
"""Attention kernels over rows that are packed into one line."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench import machine

from .cell import Outcome, Row, Setup
from .timing import milliseconds

BF16_BOUND = 2e-2  # outputs are of size 1 and below
DENSE = "sdpa, dense mask"
NOT_SEPARATED = "sdpa, only causal, rows not separated"

Kernel = Callable[[], Tensor]


@dataclass(frozen=True)
class Shape:
    """One line of packed rows of equal length, and the heads that attend to it."""

    length: int  # tokens of the line
    rows: int
    heads: int
    kv_heads: int
    width: int  # features of a head


PACKED = Shape(length=4096, rows=16, heads=32, kv_heads=8, width=128)
TINY = Shape(length=256, rows=4, heads=4, kv_heads=2, width=16)


@dataclass(frozen=True)
class Line:
    """One line of packed rows of equal length, as attention sees it."""

    query: Tensor  # [1, heads, tokens, width]
    key: Tensor  # the same with fewer heads
    value: Tensor
    rows: int

    @property
    def tokens(self) -> int:
        """The number of tokens of the line."""
        return self.query.shape[2]

    @property
    def row_length(self) -> int:
        """The number of tokens of each row."""
        return self.tokens // self.rows

    @property
    def groups(self) -> int:
        """How many heads of the query share one of key and value."""
        return self.query.shape[1] // self.key.shape[1]

    def owners(self) -> Tensor:
        """Return the row of each token, [tokens]."""
        return torch.arange(self.tokens, device=self.query.device) // self.row_length

    def ends(self) -> Tensor:
        """Return where each row begins, and the end of the line, int32, [rows + 1]."""
        device = self.query.device
        return torch.arange(0, self.tokens + 1, self.row_length, device=device, dtype=torch.int32)


def packed_attention(setup: Setup) -> Outcome:
    """Compare attention kernels on a line of 4,096 tokens with 16 rows, and measure their speed."""
    line = random_line(setup, TINY if setup.tiny else PACKED)
    kernels = kernels_for(setup, line)
    with torch.no_grad():
        wanted = kernels[DENSE]().float()
    outcome = Outcome(ok=True)
    for name, kernel in kernels.items():
        row = measure(setup, name, kernel, wanted)
        difference = row.get("from the dense mask")
        if difference is not None and name != NOT_SEPARATED:
            outcome.require(difference <= BF16_BOUND)
        outcome.rows.append(row)
        setup.keep(outcome)
    return outcome


def random_line(setup: Setup, shape: Shape) -> Line:
    """Return a line of random queries, keys and values, in bf16 on a GPU."""
    options = {
        "dtype": torch.bfloat16 if setup.on_gpu else torch.float32,
        "device": setup.device,
        "requires_grad": True,
    }
    query = torch.randn(1, shape.heads, shape.length, shape.width, **options)
    key = torch.randn(1, shape.kv_heads, shape.length, shape.width, **options)
    value = torch.randn(1, shape.kv_heads, shape.length, shape.width, **options)
    return Line(query, key, value, shape.rows)


def kernels_for(setup: Setup, line: Line) -> dict[str, Kernel]:
    """Return the kernels that run here by name; each attends over the packed rows."""
    kernels = {DENSE: dense_kernel(line), NOT_SEPARATED: causal_kernel(line)}
    if not setup.on_gpu:
        return kernels
    kernels["flex"] = flex_kernel(line)
    varlen = varlen_kernel(line)
    if varlen is not None:
        kernels["torch's varlen"] = varlen
    if machine.version_of("flash-attn"):
        kernels["flash-attn, varlen"] = flash_kernel(line)
    return kernels


def dense_kernel(line: Line) -> Kernel:
    """Return torch's attention with a mask of all pairs of tokens."""
    from torch.nn.functional import scaled_dot_product_attention

    owners = line.owners()
    places = torch.arange(line.tokens, device=line.query.device)
    same_row = owners[:, None] == owners
    before = places[:, None] >= places
    mask = (same_row & before)[None, None]

    def dense() -> Tensor:
        keys = line.key.repeat_interleave(line.groups, 1)
        values = line.value.repeat_interleave(line.groups, 1)
        return scaled_dot_product_attention(line.query, keys, values, attn_mask=mask)

    return dense


def causal_kernel(line: Line) -> Kernel:
    """Return torch's attention over the line as if it were one row."""
    from torch.nn.functional import scaled_dot_product_attention

    options = {"is_causal": True, "enable_gqa": True}
    return lambda: scaled_dot_product_attention(line.query, line.key, line.value, **options)


def flex_kernel(line: Line) -> Kernel:
    """Return flex_attention, compiled, with a block mask of the rows."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    owners = line.owners()

    def sees(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (owners[i] == owners[j]) & (i >= j)

    device = line.query.device
    mask = create_block_mask(sees, 1, None, line.tokens, line.tokens, device=device)
    compiled = torch.compile(flex_attention)
    options = {"block_mask": mask, "enable_gqa": True}
    return lambda: compiled(line.query, line.key, line.value, **options)


def varlen_kernel(line: Line) -> Kernel | None:
    """Return torch's own FlashAttention (torch.nn.attention.varlen), None if torch lacks it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    borders = (line.ends(), line.ends(), line.row_length, line.row_length)
    # Causal: no bound on the left, and nothing on the right
    options: dict[str, Any] = {"window_size": (-1, 0)}
    takes_groups = "enable_gqa" in inspect.signature(varlen_attn).parameters
    if takes_groups:
        options["enable_gqa"] = True

    def varlen() -> Tensor:
        keys = flat(line.key)
        values = flat(line.value)
        if not takes_groups:
            keys = keys.repeat_interleave(line.groups, 1)
            values = values.repeat_interleave(line.groups, 1)
        out: Any = varlen_attn(flat(line.query), keys, values, *borders, **options)
        return out.transpose(0, 1)[None]

    return varlen


def flash_kernel(line: Line) -> Kernel:
    """Return flash-attn's own varlen function."""
    from flash_attn import flash_attn_varlen_func

    borders = (line.ends(), line.ends(), line.row_length, line.row_length)

    def flash() -> Tensor:
        rows = [flat(tensor) for tensor in (line.query, line.key, line.value)]
        out = flash_attn_varlen_func(*rows, *borders, causal=True)
        return out.transpose(0, 1)[None]

    return flash


def flat(tensor: Tensor) -> Tensor:
    """Return [1, heads, tokens, width] as [tokens, heads, width]."""
    return tensor[0].transpose(0, 1)


def measure(setup: Setup, name: str, kernel: Kernel, wanted: Tensor) -> Row:
    """Return one row: milliseconds forward and with the backward pass, and the difference.

    wanted: the output of the reference.
    """
    try:
        with torch.no_grad():
            difference = (kernel().float() - wanted).abs().max().item()
            forward = milliseconds(kernel, setup.device)
        both = milliseconds(lambda: kernel().sum().backward(), setup.device)
    except Exception as error:
        # That this GPU or version lacks a kernel is a finding; the other kernels still count.
        first_line = str(error).partition("\n")[0]
        return {"attention": name, "result": f"{type(error).__name__}: {first_line[:200]}"}
    return {
        "attention": name,
        "result": "ran",
        "forward, ms": round(forward, 3),
        "with backward, ms": round(both, 3),
        "from the dense mask": difference,
    }
