# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose frozen weights are in float8 (e4m3), and so are their products.

Each row of a weight has a scale by which its largest number becomes that of e4m3. The same is done
in each pass to the rows of what it is multiplied with. A product is then one call of
`torch._scaled_mm` with a scale a row: its sums are in fp32, its result is in bf16. A CPU computes
the same, without its speed.
"""

import re
from collections.abc import Collection
from typing import Any

import torch

from core.engine import is_sharded
from core.exits import Exit, fail

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of rows of zeros
MULTIPLE = 16  # of which the kernels want both sizes of a weight to be
IN_BLOCK = re.compile(r"\.\d+\.")  # in the names of layers: the head is in no block


def scale_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of a matrix in e4m3, and the scale of each in fp32, [rows, 1].

    A row is what is returned, times its scale.
    """
    largest = matrix.abs().amax(dim=1, keepdim=True).float()
    scale = (largest / LARGEST).clamp(min=SMALLEST_SCALE)
    return (matrix / scale).to(E4M3), scale


class Product(torch.autograd.Function):
    """x times the transposed weight, in float8, with a gradient of x alone.

    x is [tokens, in], weight [out, in] once it is viewed as e4m3, and row_scale [out, 1]. In the
    backward pass the weight is summed over its rows, whose scales are no factors of that sum: they
    are multiplied into the gradient before it is scaled itself. So one copy of the weight is
    enough.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        row_scale: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return [tokens, out] in `dtype`. Cast here, since a cast has its gradient in bf16."""
        ctx.save_for_backward(weight, row_scale)
        ctx.dtype = x.dtype
        rows, scale = scale_rows(x)
        out = torch._scaled_mm(
            rows,
            weight.view(E4M3).t(),
            scale_a=scale,
            scale_b=row_scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return out.to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the gradient of x, in its dtype."""
        weight, row_scale = ctx.saved_tensors
        rows, scale = scale_rows(gradients[0] * row_scale.t())
        by_column = weight.view(E4M3).t().contiguous().t()  # The kernels of Hopper want it so
        gradient = torch._scaled_mm(
            rows,
            by_column,
            scale_a=scale,
            scale_b=scale.new_ones(1, len(by_column.t())),
            out_dtype=torch.bfloat16,
        )
        return gradient.to(ctx.dtype), None, None, None


class Float8Linear(torch.nn.Linear):
    """A frozen linear layer in float8.

    Attributes:
        weight: its bytes in the dtype that it had, as gloo sends no e4m3, and FSDP2 would cast it.
        row_scale: scales of the weight's rows, fp32, [out, 1], which no file has.
    """

    def __init__(self, linear: torch.nn.Linear, device: torch.device, shards: bool) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        whole = linear.weight.detach()
        rows, scale = scale_rows(whole.to(device))
        self.register_buffer("row_scale", scale, persistent=False)
        if shards:  # FSDP2 takes its part from where the model was loaded
            rows = rows.to(whole.device)
        packed: Any = torch.nn.Parameter(rows.view(whole.dtype), requires_grad=False)
        packed.packed_numel = whole.numel()  # for the summary
        self.weight = packed

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return [..., out] in the dtype in which a linear layer would."""
        dtype = input.dtype
        if torch.is_autocast_enabled(input.device.type):
            dtype = torch.get_autocast_dtype(input.device.type)
        flat = input.reshape(-1, self.in_features)
        out: Any = Product.apply(flat, self.weight, self.row_scale, dtype)
        out = out.view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias.to(dtype)


def convert(model: Any, layout: Any, trained: Collection[str]) -> None:
    """Put the linear layers in a model's blocks into float8, on the device one after another.

    Those stay as they are whose sizes the kernels do not take. Ends with 64 if none is left.

    Args:
        trained: names of modules that are trained whole, which stay as they are too.
    """
    shards = is_sharded(layout.accelerator)
    found = False
    for name, module in list(model.named_modules()):
        sizes = getattr(module, "in_features", 1), getattr(module, "out_features", 1)
        fits = type(module) is torch.nn.Linear and not any(size % MULTIPLE for size in sizes)
        is_trained = any(name.endswith(f".{one}") for one in trained)
        if fits and IN_BLOCK.search(name) and not is_trained:
            model.set_submodule(name, Float8Linear(module, layout.device, shards))
            found = True
    if not found:
        kind = type(model).__name__
        fail(Exit.USAGE, f"--load_in_fp8: {kind} has no linear layers in blocks: leave it out")
