# SPDX-License-Identifier: Apache-2.0
"""Workarounds for other libraries: what is wrong, where it is reported, and what is done.

Each is one function, called by its name where it is needed. A test that is marked with that name
shows the harm without it (most are in tests/launch/test_upstream.py): once there is no harm any
more, the library is fixed and the workaround is removed.
`pytest tests/launch/test_upstream.py -m workaround` runs the tests that show the harm without each.

Other libraries are imported inside the functions, since `start_faster` must run before they are
imported.
"""

import atexit
import contextlib
import copy
import functools
import importlib
import inspect
import logging
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from components.plugins import fsdp_plugin, mixed_dtype
from core.workarounds import workaround

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


# ---- At the start ----
def start_faster() -> None:
    """Have the libraries import less than they would, and warn less.

    Call it before any of them is imported.
    """
    silence_missing_cpu_kernel()
    import_bitsandbytes_uncompiled()
    ask_for_deepspeed_without_importing_it()


@workaround("bitsandbytes/backends/default/ops.py, _try_torch_compile", seen="bitsandbytes 0.50")
def import_bitsandbytes_uncompiled() -> None:
    """Import bitsandbytes, if it is installed, without torch's compiler.

    bitsandbytes calls torch.compile while it is imported, which imports torch._inductor: half a
    second of each start, since peft imports bitsandbytes and transformers' schedules import peft.
    Here its functions are compiled when they are first called.
    """
    with compiling_at_first_call(), contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401  for what its import does


@contextlib.contextmanager
def compiling_at_first_call() -> Generator[None]:
    """Have torch.compile return functions that are compiled when they are first called."""
    import torch

    compile_at_once = torch.compile

    def compile_later(function: Callable | None = None, **options: Any) -> Callable:
        if function is None:
            return functools.partial(compile_later, **options)

        @functools.cache
        def compiled() -> Callable:
            return compile_at_once(function, **options)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later  # pyrefly: ignore[bad-assignment]  # without its overloads
    try:
        yield
    finally:
        torch.compile = compile_at_once


@workaround("bitsandbytes/backends/cpu/ops.py, get_kernel", seen="bitsandbytes 0.50")
def silence_missing_cpu_kernel() -> None:
    """Stop bitsandbytes from warning, while it is imported, that an optional kernel is missing.

    The kernel multiplies 4-bit weights on CPUs with AVX512-BF16, and comes with another package.
    Call this before anything imports bitsandbytes.
    """
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


@workaround("accelerate/utils/other.py, extract_model_from_parallel", seen="accelerate 1.15")
def ask_for_deepspeed_without_importing_it() -> None:
    """Have accelerate unwrap a model without importing deepspeed, which takes up to a second.

    accelerate imports it to find out whether a model is DeepSpeed's engine. No model is, as long as
    nothing has imported deepspeed.
    """
    from accelerate.utils import other

    is_installed = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules and is_installed()


# ---- Accelerator ----
@workaround("https://github.com/huggingface/accelerate/pull/2531", seen="accelerate 1.15")
def reduce_each_micro_batch(accelerator: "Accelerator") -> None:
    """Have FSDP reduce gradients in each micro-batch.

    Under `no_sync` every rank would hold whole gradients, which sharding is meant to avoid.
    """
    plugin = fsdp_plugin(accelerator)
    if plugin is None:
        return
    if accelerator.is_fsdp2 or plugin.sharding_strategy.name != "NO_SHARD":
        accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True


@workaround("accelerate/accelerator.py, clip_grad_norm_", seen="accelerate 1.15")
def configure_deepspeed_for_loop(
    accelerator: "Accelerator", max_grad_norm: float, micro_batch_size: int
) -> None:
    """Set in DeepSpeed's config what the calls of the training loop do not pass to its engine.

    The engine ignores the argument of clip_grad_norm_, and without the size of a micro-batch
    accelerate requires a data loader in `prepare`.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin:
        plugin.deepspeed_config["gradient_clipping"] = max_grad_norm
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = micro_batch_size


@workaround("deepspeed/runtime/engine.py, _do_optimizer_sanity_check", seen="deepspeed 0.19")
def reduce_in_fp32(accelerator: "Accelerator") -> None:
    """Under mixed precision, keep reduced gradients, FSDP1's buffers and FSDP2's outputs in fp32.

    accelerate and DeepSpeed reduce gradients between ranks in the dtype of computation, and ZeRO
    adds micro-batches in it too. In bf16 each addition then keeps 8 bits. In fp32 a reduction takes
    twice the traffic, and ZeRO-2 and 3 keep 2 more bytes per gradient element. Micro-batches are
    still added in the dtype of computation where DeepSpeed refuses fp32 (ZeRO-0), would use another
    optimizer (ZeRO-1), or would keep a second copy on the GPU (ZeRO-2 with offload:
    stage_1_and_2.py, _use_compact_grad_partition_buffer).
    """
    import torch

    plugin = fsdp_plugin(accelerator)
    if plugin is not None:
        policy = plugin.mixed_precision_policy
        if policy and accelerator.is_fsdp2:
            # Without output_dtype=None the loss, which is a sum, would be rounded.
            plugin.mixed_precision_policy = replace(
                policy, reduce_dtype=torch.float32, output_dtype=None
            )
        elif policy:
            # Without buffer_dtype=None the frequencies of rotary positions would be rounded, by
            # 0.4 % in bf16.
            plugin.mixed_precision_policy = replace(
                policy, reduce_dtype=torch.float32, buffer_dtype=None
            )
    if accelerator.state.deepspeed_plugin:
        reduce_in_fp32_under_deepspeed(accelerator.state.deepspeed_plugin)


def reduce_in_fp32_under_deepspeed(plugin: Any) -> None:
    """Set the dtypes of reductions and of added gradients, unless the config does."""
    config = plugin.deepspeed_config
    config.setdefault("communication_data_type", "fp32")
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    offloads = offload.get("device", "none") != "none"
    if plugin.zero_stage == 3 or (plugin.zero_stage == 2 and not offloads):
        config.setdefault("data_types", {"grad_accum_dtype": "fp32"})


@workaround("deepspeed/comm/torch.py, get_all_gather_function", seen="deepspeed 0.19")
def silence_old_names_of_collectives() -> None:
    """Stop torch from warning in each step that DeepSpeed calls collectives by old names."""
    warnings.filterwarnings(
        "ignore",
        message=r"`torch.distributed.(all_gather_into|reduce_scatter)_tensor` is deprecated",
        category=FutureWarning,
    )


# ---- Model ----
@workaround("bitsandbytes/nn/modules.py, Linear4bit", seen="bitsandbytes 0.50")
def keep_4bit_weights_as_loaded(model: "torch.nn.Module") -> None:
    """Stop a CPU from repacking 4-bit weights, after which gradients stop at their layers.

    Only a CPU with AVX512-BF16 repacks, in a forward pass of an evaluation.
    """
    for module in model.modules():
        # pyrefly: ignore[bad-argument-type]  # torch annotates attributes as modules or tensors
        module.support_avx512bf16_for_cpu = False


@workaround("transformers/core_model_loading.py, set_param_for_module", seen="transformers 5.23")
def keep_frozen_weights_frozen(model: Any) -> None:
    """Freeze the weights that a model freezes when it is made, which loading forgets.

    ERNIE 4.5's mixtures of experts choose experts by a bias that has no gradient. It would be a
    trained weight without a gradient: DDP would wait for it, and FSDP's ranks would disagree about
    the optimizer's state when they save it.
    """
    import torch

    source = inspect.getsource(sys.modules[type(model).__module__])
    if "requires_grad=False" not in source:  # Most models; making one more would take time.
        return
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    frozen = {name for name, weight in made.named_parameters() if not weight.requires_grad}
    for name, weight in model.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)


@workaround("bitsandbytes/autograd/_functions.py, MatMul8bitLt", seen="bitsandbytes 0.50")
def silence_int8_casts() -> None:
    """Stop bitsandbytes from warning, in each int8 layer and pass, that it casts bf16 to fp16.

    On a CPU, where the test runs, it only warns in evaluations.
    """
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


@workaround("torch/optim/lr_scheduler.py, _opt_called", seen="torch 2.11 to 2.13")
def silence_wrong_order_of_steps() -> None:
    """Stop torch from warning that the schedule steps before the optimizer, where it does not.

    torch looks at the optimizer that the schedule was made with. DeepSpeed replaces it with one of
    its own when it offloads, and when a run resumes, the schedule is advanced before any step.
    """
    warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")


@workaround("peft/peft_model.py, is_gradient_checkpointing", seen="peft 0.21")
def silence_old_name_of_checkpointing() -> None:
    """Stop transformers from warning that peft asks for gradient checkpointing by its old name."""
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )


@workaround("transformers/modeling_utils.py, initialize_weights", seen="transformers 5.23")
@contextlib.contextmanager
def drawing_new_weights_from(seed: int) -> Generator[None]:
    """Draw the weights that a model's files do not hold from this seed.

    Under ZeRO-3 some models draw random numbers before, on some ranks more than on others.
    """
    from accelerate.utils import set_seed
    from transformers import PreTrainedModel

    draw = PreTrainedModel.initialize_weights

    def draw_from_seed(self: PreTrainedModel) -> None:
        set_seed(seed)
        draw(self)

    PreTrainedModel.initialize_weights = draw_from_seed
    try:
        yield
    finally:
        PreTrainedModel.initialize_weights = draw


@workaround("transformers/modeling_utils.py, _initialize_missing_keys", seen="transformers 5.23")
def share_new_modules(
    model: "torch.nn.Module", names: Iterable[str], accelerator: "Accelerator"
) -> None:
    """Under FSDP, give these modules the weights of rank 0 on every rank.

    transformers then makes new weights on rank 0 only. The other ranks have noise or meta tensors;
    accelerate cannot tell the latter apart, so that the optimizer would train only one of them.
    """
    from accelerate.utils import gather_object

    if fsdp_plugin(accelerator) is None:
        return
    for name in names:
        module = model.get_submodule(name)
        weights = module.cpu().state_dict() if accelerator.is_main_process else None
        module.load_state_dict(gather_object([weights])[0], assign=True)


@workaround(
    "accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy", seen="accelerate 1.15"
)
def wrap_layers_that_are_there(model: Any) -> None:
    """Have FSDP wrap only those kinds of layers that the model has.

    The language models of Gemma 4 and Qwen3.5 also name the layers of the vision tower that they
    lack, and accelerate ends with an error.
    """
    named = getattr(model, "_no_split_modules", None) or ()
    found = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = {name for name in named if name in found}


@workaround(
    "accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy", seen="accelerate 1.15"
)
def leave_embeddings_to_accelerate(model: Any) -> None:
    """Remove embeddings from the modules that are wrapped whole: accelerate wraps them itself."""
    wrapped = model._no_split_modules or ()
    model._no_split_modules = {name for name in wrapped if not name.endswith("Embeddings")}


@workaround(
    "transformers/integrations/deepspeed.py, _load_state_dict_into_zero3_model",
    seen="transformers 5.23",
)
def save_weights_by_their_own_names(model: Any) -> None:
    """Stop ZeRO-3 from saving weights by the names of BERT's first files, gamma and beta."""
    model._weight_conversions = None


@workaround("deepspeed/runtime/engine.py, forward", seen="deepspeed 0.19")
def cast_pixels(model: "torch.nn.Module") -> None:
    """Cast a model's pixels to the dtype of its weights before its forward pass.

    DeepSpeed in bf16 does not cast them, and not every model does so itself.
    """

    def cast(model: "torch.nn.Module", inputs: Any, named: dict[str, Any]) -> Any:
        dtype = next(model.parameters()).dtype
        return inputs, {"pixel_values": named["pixel_values"].to(dtype)}

    model.register_forward_pre_hook(cast, with_kwargs=True)


@workaround("https://github.com/huggingface/transformers/issues/30228", seen="transformers 5.23")
@contextlib.contextmanager
def gathered_outside_of_layers(model: Any, accelerator: "Accelerator") -> Generator[None]:
    """Have FSDP keep whatever belongs to no layer gathered within this context.

    FSDP gathers embeddings and head in the forward pass of the whole model, but generate first
    calls the encoder by itself. Layers gather themselves, and under ZeRO-3 so do all modules.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    if accelerator.is_fsdp2:
        model.unshard()
    # This is for FSDP1, and does nothing to other models.
    with FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False):
        yield


@workaround("transformers/models/bart/modeling_bart.py, layerdrop", seen="transformers 5.23")
def turn_off_layerdrop(model: "torch.nn.Module") -> None:
    """Turn off layerdrop: if one rank skipped a layer, the others would wait for it forever."""
    for module in model.modules():
        # pyrefly: ignore[bad-argument-type]  # torch annotates attributes as modules or tensors
        module.layerdrop = 0.0


@workaround(
    "torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _validate_no_duplicate_params",
    seen="torch 2.13",
)
def share_embedding_modules(model: Any) -> None:
    """Give encoder and decoder one embedding module: FSDP2 requires each weight in one module."""
    shared = model.get_input_embeddings()
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is type(shared) and child.weight is shared.weight:
                setattr(module, name, shared)


# ---- Adapters ----
@workaround("deepspeed/runtime/engine.py, _configure_distributed_model", seen="deepspeed 0.19")
def cast_for_zero3(model: "torch.nn.Module", accelerator: "Accelerator") -> None:
    """Under ZeRO-3 in bf16 or fp16, cast the modules that peft has made to that dtype.

    DeepSpeed casts the whole model in its other stages, and makes fp32 master weights of what is
    trained. With ZeRO-3 it does not cast models that were loaded under it, so that adapters and
    copied heads would stay in fp32: inputs of adapters would be cast twice, and a copied head
    fails.
    """
    import torch

    plugin = accelerator.state.deepspeed_plugin
    dtype = mixed_dtype(accelerator)
    if not plugin or plugin.zero_stage != 3 or dtype is None:
        return
    for weight in model.parameters():
        if weight.requires_grad and not hasattr(weight, "ds_id"):
            weight.data = weight.data.to(getattr(torch, dtype))


@workaround("peft/tuners/tuners_utils.py, cast_input_dtype_enabled", seen="peft 0.21")
def leave_casts_to_autocast(
    model: "torch.nn.Module", accelerator: "Accelerator", use_dora: bool
) -> None:
    """Stop peft from casting the inputs of adapters where autocast casts them anyway.

    peft casts the input of each adapter to the dtype of its weights, fp32, and autocast casts that
    copy back to bf16 or fp16. Both copies are needless, and the second is kept for the backward
    pass: query, key and value share one input, but each keeps a copy of its own. Loss and gradients
    are bit for bit the same without these copies; with --lora_dropout they agree to a rounding,
    since dropout then computes in the dtype of the input.

    The cast stays in two cases. FSDP2 and DeepSpeed do not autocast but cast the weights, adapters
    included: there it does nothing if the dtypes agree, and is needed if they do not. DoRA computes
    the norms of whole weights in the dtype of this input, so that its results would change.
    """
    autocasts = accelerator.native_amp and not accelerator.is_fsdp2
    if not autocasts or use_dora:
        return
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):  # peft's layers of experts ignore it.
            # pyrefly: ignore[bad-argument-type]  # torch annotates attributes as modules or tensors
            module.cast_input_dtype_enabled = False


@workaround("https://github.com/pytorch/pytorch/issues/104690", seen="torch 2.13")
def wrap_adapters_for_fsdp1(model: "torch.nn.Module", accelerator: "Accelerator") -> None:
    """Give adapters FSDP1 units of their own, or it would keep gradients for the frozen base."""
    from peft.utils.other import fsdp_auto_wrap_policy

    plugin = fsdp_plugin(accelerator)
    if plugin is not None and not accelerator.is_fsdp2:
        plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)


@workaround("peft/peft_model.py, disable_adapter", seen="peft 0.21")
@contextlib.contextmanager
def adapters_disabled() -> Generator[None]:
    """Run models without their adapters, and without the modules beside them, in this context.

    peft's disable_adapter changes requires_grad, which FSDP2 records when a model first runs: in
    bf16 and fp16 the next backward pass would fail.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    of_layers = BaseTunerLayer.disable_adapters
    of_modules = AuxiliaryTrainingWrapper.disable_adapters  # those of --modules_to_save
    BaseTunerLayer.disable_adapters = True  # pyrefly: ignore[bad-assignment]  # a property
    AuxiliaryTrainingWrapper.disable_adapters = True  # pyrefly: ignore[bad-assignment]
    try:
        yield
    finally:
        BaseTunerLayer.disable_adapters = of_layers
        AuxiliaryTrainingWrapper.disable_adapters = of_modules


# ---- Mesh ----
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


@workaround("torch/nn/parallel/distributed.py, _rebuild_buckets", seen="torch 2.11 to 2.13")
def settle_gradient_buckets(model: Any) -> None:
    """Have DDP arrange its buckets of gradients before the first step instead of after it.

    With three or more ranks the place of a gradient in its bucket decides in which order the ranks'
    parts are added. DDP arranges the buckets once, after the first backward pass of a process, so
    that the first step after a resume would differ in its last bits from the same step of a run
    without a break. Here that pass is one whose gradients are all zero.
    """
    import torch

    wrapped = getattr(model, "_orig_mod", model)  # torch.compile's module is outermost.
    if not isinstance(wrapped, torch.nn.parallel.DistributedDataParallel):
        return
    ignored = wrapped.parameters_to_ignore
    trained = [
        weight
        for name, weight in wrapped.module.named_parameters()
        if weight.requires_grad and name not in ignored
    ]
    zero = torch.zeros((), device=trained[0].device)
    total = sum((weight.sum() for weight in trained), zero)
    wrapped.reducer.prepare_for_backward([])  # as at the end of a forward pass
    (0 * total).backward()
    for weight in trained:
        weight.grad = None


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


@workaround("accelerate/utils/fsdp_utils.py, fsdp2_prepare_model", seen="accelerate 1.15")
def silence_flattened_meshes() -> None:
    """Stop torch from warning that accelerate takes a joint dimension from a mesh by its name."""
    warnings.filterwarnings("ignore", message="Slicing a flattened dim from root mesh")


@workaround(
    "torch/distributed/tensor/_redistribute.py, _warn_flatten_optimization_not_possible",
    seen="torch 2.13",
)
def silence_sums_over_two_meshes() -> None:
    """Stop torch from warning that the norm of a step is added up over one mesh after the other.

    It means speed, of one number a tensor, and the sum is the same on all ranks.
    """
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


@workaround(
    "torch/distributed/fsdp/_fully_shard/_fsdp_state.py, _register_pre_backward_hook",
    seen="torch 2.13",
)
def silence_views_of_split_embeddings() -> None:
    """Stop torch from warning, once a rank, that a split embedding returns a view under FSDP2.

    Gradients would be wrong if an operation changed it in place. Llama's does not, nor does
    --neftune_noise_alpha, and evidence/test_parity.py finds the gradients of one process.
    """
    message = r"FSDP2-wrapped module \(FSDPEmbedding\) returned a view tensor"
    warnings.filterwarnings("ignore", message=message)


# ---- Optimizer ----
@workaround("deepspeed/runtime/engine.py, _take_model_step", seen="deepspeed 0.19")
def check_gradients_of_zero0(
    optimizer: "torch.optim.Optimizer", accelerator: "Accelerator"
) -> None:
    """Leave out steps of ZeRO-0 whose gradients are not finite. Call it before `prepare`.

    The engine steps inside backward, and in fp32 without a check; it reads `overflow`.
    """
    import torch

    def drop_nonfinite(optimizer: Any, *_: Any) -> None:
        gradients = []
        for group in optimizer.param_groups:
            gradients += [weight.grad for weight in group["params"] if weight.grad is not None]
        optimizer.overflow = not torch.nn.utils.get_total_norm(gradients).isfinite().item()
        if optimizer.overflow:
            optimizer.zero_grad()  # Weights without a gradient are not updated.

    plugin = accelerator.state.deepspeed_plugin
    if plugin and plugin.zero_stage == 0:
        optimizer.overflow = False  # pyrefly: ignore[missing-attribute]  # of DeepSpeed's own
        optimizer.register_step_pre_hook(drop_nonfinite)


@workaround(
    "deepspeed/runtime/fp16/unfused_optimizer.py, initialize_optimizer_states",
    seen="deepspeed 0.19",
)
def undo_allocating_step(
    masters: Iterable[tuple["torch.Tensor", "torch.Tensor"]], optimizer: "torch.optim.Optimizer"
) -> None:
    """Undo the step with zero gradients that allocates AdamW's state under ZeRO-0.

    DeepSpeed takes it in bf16 and fp16. The step decays the master weights, and it is counted: the
    first real step would have the bias correction of a second one, and 0.74 of its length. The
    moments are still zero after it.

    Args:
        masters: the weights, each with its fp32 master weight.
        optimizer: the one that DeepSpeed wraps.
    """
    for weight, master in masters:
        master.data.copy_(weight)
        entry = optimizer.state[master]
        if "step" in entry:  # It is a tensor in torch, a number in bitsandbytes.
            entry["step"] = entry["step"] * 0


@workaround("bitsandbytes/optim/optimizer.py, GlobalOptimManager", seen="bitsandbytes 0.50")
def keep_embeddings_in_32_bits(model: "torch.nn.Module") -> None:
    """Have bitsandbytes' 8-bit optimizers keep 32-bit state for embeddings.

    bitsandbytes advises it, and transformers' Trainer does it: the gradients of rare tokens are too
    uneven for 8 bits. Call it before the optimizer is made. bitsandbytes has one record per process
    and identifies weights by their place in an optimizer's groups, so the record is cleared.
    """
    import torch
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.initialize()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})


# ---- Export ----
@workaround("peft/utils/save_and_load.py, get_peft_model_state_dict", seen="peft 0.21")
def remove_fsdp1_wrappers(model: "torch.nn.Module") -> None:
    """Remove FSDP1's wrappers from a model, since peft finds no adapters to save inside them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, FullyShardedDataParallel):
                module._modules[name] = child.module


# ---- Pipelines ----
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


# ---- At the end ----
@workaround("torch/nn/parallel/distributed.py, _ddp_init_helper", seen="torch 2.13")
def keep_group_until_exit() -> None:
    """Keep the process group from being freed with the model. Call it before it is destroyed.

    DDP's reducer would be its last owner. Python frees that with the GIL held, and the thread of
    gloo, for which the group then waits, may need the GIL to free the work of the last barrier: the
    rank would never end.
    """
    from torch import distributed

    if distributed.is_initialized():
        atexit.register(let_go, distributed.group.WORLD)


def let_go(group: Any) -> None:
    """Do nothing with a process group, to which a function for later has kept a reference."""
