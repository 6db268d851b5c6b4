# SPDX-License-Identifier: Apache-2.0
"""Workarounds for what other libraries get wrong under meshes (recipes/core/workarounds.py)."""

import contextlib
import functools
import importlib
from collections.abc import Generator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from core.workarounds import workaround


class GroupOfRanks:
    """Stands for transformers' mesh over all ranks; its only group is a tensor parallel one."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_mesh(self, names: Any) -> Any:
        """Return accelerate's mesh of the group, whatever the names."""
        return self._group


@workaround(
    "transformers/distributed/utils.py, initialize_distributed_mesh", seen="transformers 5.23"
)
@contextlib.contextmanager
def splitting_over(accelerator: Any) -> Generator[None]:
    """Have transformers split weights over accelerate's tensor parallel group within this context.

    transformers makes a mesh of its own, whose sizes must multiply to the number of all ranks. It
    would have to shard over the others too, and accelerate's FSDP2 refuses to shard again.
    """
    mixin: Any = importlib.import_module("transformers.distributed.mixin")
    group = GroupOfRanks(accelerator.torch_device_mesh["tp"])
    original = mixin.initialize_distributed_mesh
    mixin.initialize_distributed_mesh = lambda config: (accelerator.device, group)
    try:
        yield
    finally:
        mixin.initialize_distributed_mesh = original


@workaround(
    "torch/distributed/tensor/_ops/_embedding_ops.py, embedding_dense_backward_strategy",
    seen="torch 2.13",
)
def keep_gradients_split(model: Any) -> None:
    """Have the gradient of each split weight be split as the weight is.

    That of split embeddings would be whole on every rank until the step. FSDP2 makes parameters of
    its own, and splits their gradients by itself.

    A hook must not refer to its weight: what FSDP2 replaces would then stay until Python's garbage
    collector finds the cycle.
    """

    def split_by(placements: Any) -> Any:
        return lambda gradient: gradient.redistribute(placements=placements)

    for weight in model.parameters():
        if isinstance(weight, DTensor):
            weight.register_hook(split_by(weight.placements))


@workaround("peft/tuners/tuners_utils.py, _get_in_out_features", seen="peft 0.21")
@contextlib.contextmanager
def making_whole_adapters() -> Generator[None]:
    """Have peft make the adapters of split weights as large as those of whole ones.

    It makes them for a rank's part of a weight, and draws them for the part's width, on every rank
    the same (evidence/upstream/peft_lora_tp.md).
    """
    from peft.tuners.lora import LoraLayer

    original = LoraLayer._get_in_out_features

    def whole_sizes(self: Any, module: Any) -> Any:
        if isinstance(module, torch.nn.Linear):
            return module.in_features, module.out_features
        return original(self, module)

    LoraLayer._get_in_out_features = whole_sizes
    try:
        yield
    finally:
        LoraLayer._get_in_out_features = original


@workaround("torch/_tensor.py, Tensor.__deepcopy__", seen="torch 2.13")
@contextlib.contextmanager
def copying_split_weights() -> Generator[None]:
    """Have copy.deepcopy copy split weights within this context, which peft calls.

    torch copies the storage of a tensor, and a DTensor has none: "Attempted to call copy_() on an
    invalid python storage".
    """

    def copied(self: Any, memo: dict) -> Any:
        if id(self) not in memo:
            memo[id(self)] = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        return memo[id(self)]

    DTensor.__deepcopy__ = copied
    try:
        yield
    finally:
        del DTensor.__deepcopy__


@workaround(
    "transformers/distributed/tensor_parallel.py, install_forward", seen="transformers 5.23"
)
def run_copy_by_itself(layer: Any, style: Any, mesh: Any) -> None:
    """Have the copy of a split layer compute with its own weights.

    transformers puts a function around the forward pass of a split layer. A deep copy, as of
    peft's --modules_to_save, has the same function, which runs the original.

    Args:
        layer: the copy.
        style: of transformers, by which the original is split.
        mesh: the ranks over which it is split.
    """
    del layer.forward
    style.install_forward(layer, mesh)


@workaround("accelerate/accelerator.py, _prepare_tp", seen="accelerate 1.15")
def leave_whole_weights_to_fsdp(accelerator: Any) -> None:
    """Have accelerate not wrap the weights that tensor parallelism leaves whole.

    It imports ReplicateParallel, which transformers 5 no longer has. FSDP2 takes weights without a
    tensor parallel mesh as well.
    """
    if accelerator.is_fsdp2:
        accelerator._prepare_tp = lambda *prepared: prepared


@workaround(
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py, register_with_transformers",
    seen="deepspeed 0.19.8",
)
def name_size_of_heads(model: Any) -> None:
    """Have a model's config name the size of an attention head. Call it before `prepare`.

    DeepSpeed computes the size only if a config does not know the name. Mixtral's does, and has
    None.
    """
    config = model.config.get_text_config()
    if getattr(config, "head_dim", 0) is None:
        config.head_dim = config.hidden_size // config.num_attention_heads


@workaround(
    "deepspeed/runtime/sequence_parallel/ulysses_sp.py, required_query_shape",
    seen="deepspeed 0.19.8",
)
def let_batches_differ_in_size() -> None:
    """Have DeepSpeed-Ulysses take batches of any number of lines, not only of the micro-batch's.

    A last batch has fewer rows, one of pairs has two lines for each, and documents of one block get
    lines of their own.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    if hasattr(UlyssesSPAttentionHF.forward, "__wrapped__"):  # By an earlier call
        return
    original = UlyssesSPAttentionHF.forward

    @functools.wraps(original)
    def forward(attention: Any, module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        attention.batch_size = len(query)
        for name in ("required_query_shape", "required_key_value_shape", "required_context_shape"):
            tokens, _, *others = getattr(attention, name)
            setattr(attention, name, type(query.shape)([tokens, len(query), *others]))
        return original(attention, module, query, *args, **kwargs)

    UlyssesSPAttentionHF.forward = forward
