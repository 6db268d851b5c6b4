# SPDX-License-Identifier: Apache-2.0
"""Workarounds of tensor, expert and pipeline parallelism and of Ulysses, as in core/workarounds.py.

Other libraries are imported inside the functions: most runs need none of them.
"""

import contextlib
import functools
import importlib
from collections.abc import Generator
from typing import Any

from core.workarounds import workaround


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


class GroupOfRanks:
    """Stands for transformers' mesh over all ranks; its only group is a tensor parallel one."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_mesh(self, names: Any) -> Any:
        """Return accelerate's mesh of the group, whatever the names."""
        return self._group


class GroupsOfExperts:
    """Stands for transformers' mesh over all ranks; its groups are those of a mesh of experts."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh

    def get_mesh(self, names: Any) -> Any:
        """Return the group over which experts are spread, or else the group of only this rank."""
        return self._mesh["ep" if names == "ep" else "single"]


@workaround("transformers/distributed/mixin.py, maybe_distribute_model", seen="transformers 5.23")
@contextlib.contextmanager
def spreading_experts_over(mesh: Any, device: Any) -> Generator[None]:
    """Have transformers spread experts over the groups of a mesh within this context, and no more.

    It spreads experts only over ranks over which it shards the other weights too, by FSDP2 without
    accelerate's settings. The engine of the YAML does that.

    Args:
        mesh: has the dimensions "ep" and "single".
    """
    mixin: Any = importlib.import_module("transformers.distributed.mixin")
    make_mesh = mixin.initialize_distributed_mesh
    shard = mixin.apply_fully_sharded_data_parallelism
    mixin.initialize_distributed_mesh = lambda config: (device, GroupsOfExperts(mesh))
    mixin.apply_fully_sharded_data_parallelism = lambda model, *_: model
    try:
        yield
    finally:
        mixin.initialize_distributed_mesh = make_mesh
        mixin.apply_fully_sharded_data_parallelism = shard


@workaround("https://github.com/pytorch/pytorch/issues/43690", seen="torch 2.13")
def leave_experts_out_of_ddp(model: Any) -> None:
    """Have DDP neither broadcast nor reduce the weights of which each rank has a part."""
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    names = [name for name, weight in model.named_parameters() if isinstance(weight, DTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


@workaround("accelerate/accelerator.py, prepare_model", seen="accelerate 1.15")
@contextlib.contextmanager
def ddp_takes_split_weights() -> Generator[None]:
    """Stop accelerate from refusing DTensors beside DDP, which ignores them here."""
    module: Any = importlib.import_module("accelerate.accelerator")
    original = module.model_has_dtensor
    module.model_has_dtensor = lambda model: False
    try:
        yield
    finally:
        module.model_has_dtensor = original


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
    from torch.distributed.tensor import DTensor

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
    import torch
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
    import torch
    from torch.distributed.tensor import DTensor

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
    seen="deepspeed 0.19",
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
    seen="deepspeed 0.19",
)
def let_batches_differ_in_size(accelerator: Any) -> None:
    """Have DeepSpeed-Ulysses take batches of any number of lines, not only of the micro-batch's.

    A last batch has fewer rows, one of pairs has two lines for each, and documents of one block get
    lines of their own.
    """
    config = accelerator.parallelism_config
    if config is None or config.sp_size == 1:
        return
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


@workaround(
    "torch/distributed/pipelining/stage.py, _post_metadata_inference_cleanup", seen="torch 2.13"
)
def keep_gradients_of_shards(stage: Any) -> None:
    """Have a stage of a pipeline keep FSDP2's gradients when a schedule first runs it.

    torch drops them, as what is left of a trial run that finds out shapes. Here shapes are given,
    so there is none, and the gradients are those of earlier batches of the optimizer step.
    """
    stage._post_metadata_inference_cleanup = lambda: None


@workaround("torch/distributed/pipelining/schedules.py, _step_microbatches", seen="torch 2.13")
def run_only_forward(schedule: Any) -> None:
    """Have the eval() of a schedule with several stages per rank leave out backward passes.

    torch goes through them without doing anything, and fails where two stages that follow each
    other are on one rank, as in ZBV: "can't steal_bwd_input if this stage doesn't have backward".
    """
    needed = ("FORWARD", "SEND_F", "RECV_F", "UNSHARD", "RESHARD")
    for rank, actions in schedule.pipeline_order_with_comms.items():
        kept = [action for action in actions if action.computation_type.name in needed]
        schedule.pipeline_order_with_comms[rank] = kept
