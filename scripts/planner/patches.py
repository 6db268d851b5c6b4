# SPDX-License-Identifier: Apache-2.0
"""What the trace changes in other libraries while it runs, so that they accept fake tensors.

Seen in transformers 5.23 and torch 2.13. tests/unit/planner/test_patches.py shows what happens
without it.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from transformers import masking_utils


@contextlib.contextmanager
def known_packing(packed: bool) -> Iterator[None]:
    """Make transformers take sequences as packed, or not, without looking at them.

    It reads that from the values of position_ids. A fake tensor has none, so that every sequence
    would count as packed.
    """

    def find_as_known(position_ids: torch.Tensor) -> torch.Tensor | None:
        if packed:
            return torch.zeros_like(position_ids)
        return None

    find = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = find_as_known
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find


@contextlib.contextmanager
def real_meshes() -> Iterator[None]:
    """Make meshes of ranks of real tensors.

    FSDP2 joins its mesh with that of tensor parallelism while it shards, and a mesh keeps its ranks
    in a real tensor, which no op takes beside fake ones.
    """
    joined = DeviceMesh._concatenate

    def joined_in_reality(device_mesh_list: list[DeviceMesh]) -> DeviceMesh:
        with unset_fake_temporarily():
            return joined(device_mesh_list)

    DeviceMesh._concatenate = staticmethod(joined_in_reality)
    try:
        yield
    finally:
        DeviceMesh._concatenate = staticmethod(joined)


class GroupedProduct(torch.autograd.Function):
    """What torch's grouped product of matrices allocates: lines, sorted by expert, times experts.

    It keeps the lines for experts that are trained, and the experts for lines that have gradients.
    """

    @staticmethod
    def forward(ctx: Any, lines: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the shape of the product, [lines, outputs].

        Args:
            lines: [lines, inputs].
            experts: [experts, inputs, outputs].
        """
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
def grouped_products() -> Iterator[None]:
    """Make transformers compute experts on fake tensors of any precision.

    torch's grouped product of matrices takes fake tensors only in bf16.
    """
    moe: Any = importlib.import_module("transformers.integrations.moe")
    multiply = moe._grouped_mm

    def multiply_in_any_precision(lines: Any, experts: Any, offs: Any) -> torch.Tensor:
        if experts.dtype == torch.bfloat16:
            return multiply(lines, experts, offs=offs)
        return GroupedProduct.apply(lines.to(experts.dtype), experts)

    moe._grouped_mm = multiply_in_any_precision
    try:
        yield
    finally:
        moe._grouped_mm = multiply


@contextlib.contextmanager
def even_routing() -> Iterator[None]:
    """Make transformers send the same number of lines to each rank of a group that shares experts.

    It reads the numbers from what the routers pick, which a fake tensor does not say.
    """
    parallel: Any = importlib.import_module("transformers.distributed.expert_parallel")
    dispatch = parallel.AllToAllEP._dispatch_tokens
    read = FakeTensor.tolist

    def dispatch_evenly(
        experts: Any, hidden: torch.Tensor, picked: torch.Tensor, *rest: Any
    ) -> Any:
        ranks = experts.ep_mesh.size()
        lines, more = divmod(picked.numel(), ranks)
        sizes = [lines + 1] * more + [lines] * (ranks - more)
        FakeTensor.tolist = lambda self: [sizes, sizes]
        try:
            return dispatch(experts, hidden, picked, *rest)
        finally:
            FakeTensor.tolist = read

    parallel.AllToAllEP._dispatch_tokens = dispatch_evenly
    try:
        yield
    finally:
        parallel.AllToAllEP._dispatch_tokens = dispatch
