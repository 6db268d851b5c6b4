# SPDX-License-Identifier: Apache-2.0
"""Workarounds for other libraries: what is wrong, where it is reported, and what is done.

Each is one function, called by its name where it is needed. A test that is marked with that name
shows the harm without it (most are in tests/launch/test_upstream.py): once there is no harm any
more, the library is fixed and the workaround is removed. Workarounds that only one task or extra
needs are in its own module.
"""

import atexit
import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator, DistributedType
from accelerate.utils import set_seed
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def workaround(link: str, seen: str) -> Callable:
    """Mark a function as a workaround.

    Args:
        link: an issue or pull request, or a file of the library's source and a name in it.
        seen: the library and its version; "A to B" where versions differ in what they need.
    """

    def mark(function: Callable) -> Callable:
        # pyrefly: ignore[missing-attribute]  # Functions can have attributes.
        function.workaround = (link, seen)
        return function

    return mark


def fsdp_plugin(accelerator: Accelerator) -> Any:
    """Return accelerate's settings of FSDP, or None if FSDP is not in force.

    Their type is Any, since accelerate annotates what its fields accept, not what they hold later.
    """
    if accelerator.distributed_type != DistributedType.FSDP:
        return None
    return accelerator.state.fsdp_plugin


def mixed_dtype(accelerator: Accelerator) -> str | None:
    """Return torch's name of mixed precision's dtype, or None without mixed precision."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision)


# ---- Engine ----
@workaround("https://github.com/huggingface/accelerate/pull/2531", seen="accelerate 1.15")
def reduce_each_micro_batch(accelerator: Accelerator) -> None:
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
    accelerator: Accelerator, max_grad_norm: float, micro_batch_size: int
) -> None:
    """Set in DeepSpeed's config what the calls of the training loop do not pass to its engine.

    The engine ignores the argument of clip_grad_norm_, and without the size of a micro-batch
    accelerate requires a data loader in `prepare`.
    """
    plugin = accelerator.state.deepspeed_plugin
    if plugin:
        plugin.deepspeed_config["gradient_clipping"] = max_grad_norm
        plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = micro_batch_size


@workaround("deepspeed/runtime/engine.py, _do_optimizer_sanity_check", seen="deepspeed 0.19.8")
def reduce_in_fp32(accelerator: Accelerator) -> None:
    """Under mixed precision, keep reduced gradients, FSDP1's buffers and FSDP2's outputs in fp32.

    accelerate and DeepSpeed reduce gradients between ranks in the dtype of computation, and ZeRO
    adds micro-batches in it too. In bf16 each addition then keeps 8 bits. In fp32 a reduction takes
    twice the traffic, and ZeRO-2 and 3 keep 2 more bytes per gradient element. Micro-batches are
    still added in the dtype of computation where DeepSpeed refuses fp32 (ZeRO-0), would use another
    optimizer (ZeRO-1), or would keep a second copy on the GPU (ZeRO-2 with offload:
    stage_1_and_2.py, _use_compact_grad_partition_buffer).
    """
    plugin = fsdp_plugin(accelerator)
    if plugin is not None and plugin.mixed_precision_policy:
        # Without output_dtype=None the loss, which is a sum, would be rounded, and without
        # buffer_dtype=None the frequencies of rotary positions, by 0.4 % in bf16.
        kept = {"output_dtype": None} if accelerator.is_fsdp2 else {"buffer_dtype": None}
        plugin.mixed_precision_policy = replace(
            plugin.mixed_precision_policy, reduce_dtype=torch.float32, **kept
        )
    zero = accelerator.state.deepspeed_plugin
    if not zero:
        return
    config = zero.deepspeed_config
    config.setdefault("communication_data_type", "fp32")
    offload = config.get("zero_optimization", {}).get("offload_optimizer") or {}
    offloads = offload.get("device", "none") != "none"
    if zero.zero_stage == 3 or (zero.zero_stage == 2 and not offloads):
        config.setdefault("data_types", {"grad_accum_dtype": "fp32"})


@workaround("torch/nn/parallel/distributed.py, _rebuild_buckets", seen="torch 2.11 to 2.13")
def settle_gradient_buckets(model: Any) -> None:
    """Have DDP arrange its buckets of gradients before the first step instead of after it.

    With three or more ranks the place of a gradient in its bucket decides in which order the ranks'
    parts are added. DDP arranges the buckets once, after the first backward pass of a process, so
    that the first step after a resume would differ in its last bits from the same step of a run
    without a break. Here that pass is one whose gradients are all zero.
    """
    wrapped = getattr(model, "_orig_mod", model)  # torch.compile's module is outermost.
    if not isinstance(wrapped, DistributedDataParallel):
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


@workaround("torch/nn/parallel/distributed.py, _ddp_init_helper", seen="torch 2.13")
def keep_group_until_exit() -> None:
    """Keep the process group from being freed with the model. Call it before it is destroyed.

    DDP's reducer would be its last owner. Python frees that with the GIL held, and the thread of
    gloo, for which the group then waits, may need the GIL to free the work of the last barrier: the
    rank would never end.
    """
    if torch.distributed.is_initialized():
        atexit.register(lambda group: None, torch.distributed.group.WORLD)


# ---- Model ----
@workaround("bitsandbytes/nn/modules.py, Linear4bit", seen="bitsandbytes 0.50")
def keep_4bit_weights_as_loaded(model: torch.nn.Module) -> None:
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
    source = inspect.getsource(sys.modules[type(model).__module__])
    if "requires_grad=False" not in source:  # Most models; making one more would take time.
        return
    with torch.device("meta"):
        made = type(model)(copy.deepcopy(model.config))
    frozen = {name for name, weight in made.named_parameters() if not weight.requires_grad}
    for name, weight in model.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)


@workaround("transformers/modeling_utils.py, initialize_weights", seen="transformers 5.23")
@contextlib.contextmanager
def drawing_new_weights_from(seed: int) -> Generator[None]:
    """Draw the weights that a model's files do not hold from this seed.

    Under ZeRO-3 some models draw random numbers before, on some ranks more than on others.
    """
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


@workaround(
    "accelerate/utils/fsdp_utils.py, fsdp2_prepare_auto_wrap_policy", seen="accelerate 1.15"
)
def name_layers_to_wrap(model: Any) -> None:
    """Have FSDP wrap only those kinds of layers that the model has, and no embeddings of BERT.

    The language models of Gemma 4 and Qwen3.5 also name the layers of the vision tower that they
    lack, and accelerate ends with an error. Embeddings it wraps by itself, and fails the second
    time.
    """
    named = getattr(model, "_no_split_modules", None) or ()
    found = {type(module).__name__ for module in model.modules()}
    kept = [name for name in named if name in found and not name.endswith("Embeddings")]
    model._no_split_modules = set(kept)


# ---- Adapters ----
@workaround("deepspeed/runtime/engine.py, _configure_distributed_model", seen="deepspeed 0.19.8")
def cast_for_zero3(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Under ZeRO-3 in bf16 or fp16, cast the modules that peft has made to that dtype.

    DeepSpeed casts the whole model in its other stages, and makes fp32 master weights of what is
    trained. With ZeRO-3 it does not cast models that were loaded under it, so that adapters and
    copied heads would stay in fp32: inputs of adapters would be cast twice, and a copied head
    fails.
    """
    plugin = accelerator.state.deepspeed_plugin
    dtype = mixed_dtype(accelerator)
    if not plugin or plugin.zero_stage != 3 or dtype is None:
        return
    for weight in model.parameters():
        if weight.requires_grad and not hasattr(weight, "ds_id"):
            weight.data = weight.data.to(getattr(torch, dtype))


@workaround("peft/tuners/tuners_utils.py, cast_input_dtype_enabled", seen="peft 0.21")
def leave_casts_to_autocast(
    model: torch.nn.Module, accelerator: Accelerator, use_dora: bool
) -> None:
    """Stop peft from casting the inputs of adapters where autocast casts them anyway.

    peft casts the input of each adapter to fp32, and autocast casts that copy back. The second copy
    is kept for the backward pass, one each for query, key and value. Loss and gradients are bit for
    bit the same without them; with --lora_dropout they agree to a rounding.

    The cast stays under FSDP2 and DeepSpeed, which do not autocast but cast the weights, adapters
    included, and with DoRA, which computes the norms of whole weights in the dtype of this input.
    """
    autocasts = accelerator.native_amp and not accelerator.is_fsdp2
    if not autocasts or use_dora:
        return
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):  # peft's layers of experts ignore it.
            # pyrefly: ignore[bad-argument-type]  # torch annotates attributes as modules or tensors
            module.cast_input_dtype_enabled = False


@workaround("https://github.com/pytorch/pytorch/issues/104690", seen="torch 2.13")
def wrap_adapters_for_fsdp1(model: torch.nn.Module, accelerator: Accelerator) -> None:
    """Give adapters FSDP1 units of their own, or it would keep gradients for the frozen base."""
    from peft.utils.other import fsdp_auto_wrap_policy

    plugin = fsdp_plugin(accelerator)
    if plugin is not None and not accelerator.is_fsdp2:
        plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)


@workaround("peft/utils/save_and_load.py, get_peft_model_state_dict", seen="peft 0.21")
def remove_fsdp1_wrappers(model: torch.nn.Module) -> None:
    """Remove FSDP1's wrappers from a model, since peft finds no adapters to save inside them."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, FullyShardedDataParallel):
                module._modules[name] = child.module


# ---- Optimizer ----
@workaround("deepspeed/runtime/engine.py, _take_model_step", seen="deepspeed 0.19.8")
def check_gradients_of_zero0(optimizer: torch.optim.Optimizer, accelerator: Accelerator) -> None:
    """Leave out steps of ZeRO-0 whose gradients are not finite. Call it before `prepare`.

    The engine steps inside backward, and in fp32 without a check; it reads `overflow`.
    """

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
    seen="deepspeed 0.19.8",
)
def undo_allocating_step(
    masters: Iterable[tuple[torch.Tensor, torch.Tensor]], optimizer: torch.optim.Optimizer
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


@workaround(
    "deepspeed/runtime/zero/stage_1_and_2.py, _lazy_init_hp_params_optimizer_state",
    seen="deepspeed 0.19.8",
)
def link_optimizer_states(zero: Any) -> None:
    """Link each weight of ZeRO-1 and 2 with its optimizer state.

    DeepSpeed does so once, for the first parameter group only, and for none before the first step.

    Args:
        zero: DeepSpeed's optimizer.
    """
    zero._hp_optimizer_states_linked = False
    zero._lazy_init_hp_params_optimizer_state()


@workaround("bitsandbytes/optim/optimizer.py, GlobalOptimManager", seen="bitsandbytes 0.50")
def keep_embeddings_in_32_bits(model: torch.nn.Module) -> None:
    """Have bitsandbytes' 8-bit optimizers keep 32-bit state for embeddings.

    bitsandbytes advises it, and transformers' Trainer does it: the gradients of rare tokens are too
    uneven for 8 bits. Call it before the optimizer is made. bitsandbytes has one record per process
    and identifies weights by their place in an optimizer's groups, so the record is cleared.
    """
    from bitsandbytes.optim import GlobalOptimManager

    manager = GlobalOptimManager.get_instance()
    manager.initialize()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
