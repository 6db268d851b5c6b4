# SPDX-License-Identifier: Apache-2.0
"""The Accelerator, which ranks have other rows, and a loss that is one sum over all of them."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import transformers
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import GradientAccumulationPlugin, gather_object
from accelerate.utils.dataclasses import DynamoBackend, TorchDynamoPlugin

from core import workarounds
from core.config_names import OWNED_BY_FLAGS, find_launch_faults
from core.exits import Exit, fail
from core.extras import hooks
from core.metrics import find_missing_tracker
from core.workarounds import fsdp_plugin, mixed_dtype

# The watch over the ranks reports a hang before the process group times out.
SECONDS_AFTER_THE_WATCH = 60
# Kinds of ranks that share a row, which accelerate knows and only an extra can train
SHARING = ("tp", "cp", "sp")


# ---- Who sees which rows ----
@dataclass(frozen=True)
class Layout:
    """Which ranks have other rows, and which share the rows, a row or the weights.

    Here every rank has rows of its own and, but for what the engine shards, all weights. An extra
    for a mesh returns another kind, whose ranks may share them.

    Attributes:
        accelerator: the one of the run.
        sizes: {kind of ranks that share something: their number} of a mesh, as in {"tp": 2}.
    """

    accelerator: Accelerator
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        return self.accelerator.device

    @property
    def strategy(self) -> str:
        """What really runs, whatever was requested: "FSDP2 FULL_SHARD", "DDP x EP 2", ..."""
        words = [name_of_engine(self.accelerator)]
        words += [f"{kind.upper()} {size}" for kind, size in self.sizes.items() if size > 1]
        return " x ".join(words)

    @property
    def data_ranks(self) -> int:
        """The number of ranks, or of groups of them, that have different rows."""
        return self.accelerator.num_processes

    @property
    def data_rank(self) -> int:
        """The number of this rank, or of its group."""
        return self.accelerator.process_index

    @property
    def token_rank(self) -> int:
        """The number of the group of ranks with the same tokens, which draw the same dropout."""
        return self.accelerator.process_index

    @property
    def gradient_divisor(self) -> int:
        """The number by which the engine divides the sum of the gradients."""
        return self.accelerator.num_processes

    @property
    def multiple_of(self) -> int:
        """The number of which the length of each line has to be a multiple."""
        return 1

    @property
    def splits_weights(self) -> bool:
        """Whether each rank reads only its part of the weights."""
        return False

    def parts_of_row(self, is_training: bool = True) -> int:
        """Return over how many ranks the tokens of a row are split."""
        return 1

    def part_of(
        self, batch: Mapping[str, Any], is_training: bool = True
    ) -> contextlib.AbstractContextManager[Mapping[str, Any]]:
        """Return a context, for forward and backward pass, that gives this rank its part."""
        return contextlib.nullcontext(batch)

    def sum_over_rows(self, value: Any) -> Any:
        """Return the sum, over all ranks, of what belongs to the rows of each."""
        return self.accelerator.reduce(value)

    def sum_over_tokens(self, value: Any, is_training: bool = True) -> Any:
        """Return the sum, over all ranks, of what belongs to the tokens in each one's `part_of`."""
        return self.accelerator.reduce(value)

    def sum_over_parts(self, value: torch.Tensor, is_training: bool = True) -> torch.Tensor:
        """Return the sum of what the ranks that share this rank's rows have of them.

        In the backward pass each follows its own part, so that gradients add up to that of the sum.
        """
        return value

    def gather(self, items: list[Any]) -> list[Any]:
        """Return what all ranks have of their rows, once for ranks that share rows."""
        return gather_object(items)

    def from_pretrained(self, auto_class: Any, name: str, **options: Any) -> Any:
        """Return auto_class.from_pretrained(name, **options), or a rank's part of it."""
        return auto_class.from_pretrained(name, **options)

    def making_adapters(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which peft makes adapters, which are split as the model is."""
        return contextlib.nullcontext()

    def heeding_masks(self, model: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the model's attention heeds masks, as prompts need."""
        return contextlib.nullcontext()


def make_layout(args: Any, accelerator: Accelerator) -> Layout:
    """Return the layout of the one extra that has one for this launch, or else that of rows.

    Raises:
        ValueError: if several extras have one.
    """
    found = []
    for hook in hooks(args.EXTRAS, "layout"):
        layout = hook(args, accelerator)
        if layout is not None:
            found.append(layout)
    if len(found) > 1:
        names = " and ".join(layout.strategy for layout in found)
        raise ValueError(f"{names} cannot be combined: set all but one of the sizes to 1")
    return next(iter(found), Layout(accelerator))


def read_on_every_rank(accelerator: Accelerator) -> None:
    """Have transformers read the weights on each rank, and FSDP take them from there.

    FSDP would otherwise broadcast those of rank 0 (accelerate/utils/fsdp_utils.py,
    fsdp2_load_full_state_dict).
    """
    fsdp_plugin(accelerator).cpu_ram_efficient_loading = False
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"  # transformers reads it too


def own_parts_only(model: torch.nn.Module) -> None:
    """Give each part of a weight memory of its own.

    On the host a part is a view of the whole weight in its file, all of which stays in memory.
    """
    for weight in model.parameters():
        part: Any = getattr(weight, "_local_tensor", weight)
        if part.untyped_storage().nbytes() > part.nbytes:
            part.data = part.clone()


# ---- What is in force ----
def zero_stage(accelerator: Accelerator) -> int | None:
    """Return the stage of DeepSpeed's ZeRO, None without DeepSpeed."""
    return getattr(accelerator.state.deepspeed_plugin, "zero_stage", None)


def is_sharded(accelerator: Accelerator) -> bool:
    """Return whether an engine that can shard is in force; NO_SHARD and ZeRO-0 count too."""
    return fsdp_plugin(accelerator) is not None or zero_stage(accelerator) is not None


def name_of_engine(accelerator: Accelerator) -> str:
    """Return the engine that accelerate really runs, such as "DeepSpeed ZeRO-3" or "DDP"."""
    stage = zero_stage(accelerator)
    plugin = fsdp_plugin(accelerator)
    if stage is not None:
        return f"DeepSpeed ZeRO-{stage}"
    if plugin is None:
        return "DDP" if accelerator.num_processes > 1 else "one process"
    if plugin.fsdp_version == 1:
        return f"FSDP1 {name_of_fsdp1(accelerator)}"
    is_hybrid = getattr(accelerator.parallelism_config, "dp_replicate_size", 1) > 1
    names = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2") if is_hybrid else ("FULL_SHARD", "SHARD_GRAD_OP")
    return f"FSDP2 {names[not plugin.reshard_after_forward]}"


def name_of_fsdp1(accelerator: Accelerator) -> str:
    """Return the strategy that FSDP1 runs. Hybrid ones shard over the GPUs of one host.

    With one shard torch turns every strategy into NO_SHARD (torch/distributed/fsdp/_init_utils.py,
    _init_core_state).
    """
    requested = fsdp_plugin(accelerator).sharding_strategy.name
    num_shards = accelerator.num_processes
    if "HYBRID" in requested:
        num_shards = getattr(torch, accelerator.device.type).device_count()
    return requested if num_shards > 1 else "NO_SHARD"


# ---- The Accelerator ----
def make_accelerator(args: Any) -> tuple[Accelerator, Layout]:
    """Return the Accelerator, which has to exist before the model is loaded, and its layout.

    Ends with 64 if YAML, launcher and arguments request what would silently not be done, or what
    accelerate or an extra refuses.
    """
    faults = find_launch_faults()
    if not faults:
        for hook in hooks(args.EXTRAS, "before_accelerator"):
            faults.extend(hook(args))
    if faults:
        fail(Exit.USAGE, *faults)
    try:
        accelerator = new_accelerator(args)
        layout = make_layout(args, accelerator)
    except (ValueError, ImportError) as error:
        fail(Exit.USAGE, f"accelerate cannot run what the launch requests: {error}")
    faults = [*find_faults(args, layout), *find_missing_tracker(args)]
    if faults:
        fail(Exit.USAGE, *faults)
    set_up_engine(args, accelerator)
    set_up_compiler(args, layout)
    if not accelerator.is_local_main_process:
        transformers.utils.logging.disable_progress_bar()
    return accelerator, layout


def new_accelerator(args: Any) -> Accelerator:
    """Return the Accelerator for YAML, launcher and arguments.

    Raises:
        ValueError, ImportError: if accelerate cannot run what they request.
    """
    tracker = args.report_to
    if tracker == "none":
        tracker = None
    return Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            args.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        kwargs_handlers=[
            # Otherwise DDP would hold the gradients twice, in the weights and in its buckets.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timeout_of_groups(args.ddp_timeout)),
        ],
        log_with=tracker,
        project_dir=args.output_dir,
    )


def timeout_of_groups(ddp_timeout: int) -> timedelta:
    """Return how long the ranks of a process group wait for each other."""
    return timedelta(seconds=max(ddp_timeout, 1) + SECONDS_AFTER_THE_WATCH)


def set_up_engine(args: Any, accelerator: Accelerator) -> None:
    """Set what accelerate does not pass on to the engine, and the precision of matrix products."""
    workarounds.reduce_each_micro_batch(accelerator)
    workarounds.reduce_in_fp32(accelerator)
    workarounds.configure_deepspeed_for_loop(
        accelerator, args.max_grad_norm, args.per_device_train_batch_size
    )
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32  # For convolutions torch allows it by default.


def backward_of_sum(layout: Layout, loss: torch.Tensor) -> None:
    """Back-propagate this micro-batch's part of a loss that is a sum over the optimizer step.

    Engines average gradients over ranks, and accelerate divides the loss by the accumulation
    steps. Both are undone here, so that gradients add up to those of the whole step's loss.

    Args:
        loss: the micro-batch's sum, divided by the count of the whole step over all ranks.
    """
    accelerator = layout.accelerator
    num_parts = accelerator.gradient_accumulation_steps * layout.gradient_divisor
    # An infinite loss may have finite gradients. As NaN they spread to all ranks, which share the
    # gradient, and so all of them leave the step out. Nothing here waits for the device.
    nan_unless_finite = 0 * loss.detach()
    accelerator.backward(loss * (num_parts + nan_unless_finite))


# ---- Compiled layers ----
def set_up_compiler(args: Any, layout: Layout) -> None:
    """Have `prepare` compile each kind of layer once, if --torch_compile says so.

    Under auto a run goes on without it if nothing can be compiled, and what alone cannot be runs
    as it is.
    """
    choice = getattr(args, "torch_compile", "off")
    if choice == "auto" and compiling_pays(args, layout):
        try:
            torch.compile(torch.nn.Softmax(-1))(torch.ones(2, device=layout.device))
        except Exception as error:  # Of any kind: a compiler may be missing, or a GPU too old
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            layout.accelerator.print(f"--torch_compile auto: nothing is compiled: {reason}")
        else:
            torch._dynamo.config.suppress_errors = True
            choice = "on"
    if choice == "on":
        layout.accelerator.state.dynamo_plugin = TorchDynamoPlugin(
            backend=DynamoBackend.INDUCTOR, use_regional_compilation=True
        )


def compiling_pays(args: Any, layout: Layout) -> bool:
    """Return whether --torch_compile auto compiles: on GPUs, where all batches have one shape.

    DeepSpeed's hooks cut layers into parts, and FSDP1 refuses what is compiled. Elsewhere too it
    is left out where nobody measured it: bases of bitsandbytes, ranks that share rows, attention
    other than sdpa.
    """
    accelerator = layout.accelerator
    has_one_shape = getattr(args, "packing", args.FIXED_SHAPES)
    fits = layout.device.type == "cuda" and has_one_shape
    fits = fits and (accelerator.is_fsdp2 or not is_sharded(accelerator))
    fits = fits and max(layout.sizes.values(), default=1) == 1
    fits = fits and not (args.load_in_8bit or args.load_in_4bit)
    return fits and args.attn_implementation in (None, "sdpa")


def is_compiled(accelerator: Accelerator) -> bool:
    """Return whether `prepare` compiles."""
    plugin: Any = accelerator.state.dynamo_plugin
    return plugin.backend != DynamoBackend.NO


# ---- What would be silently wrong ----
def find_faults(args: Any, layout: Layout) -> Iterator[str]:
    """Yield a problem, with its fix, for each way in which a run would end well and be wrong."""
    yield from find_dropped(layout)
    if layout.accelerator.mixed_precision == "fp16" and layout.device.type == "cpu":
        yield (
            "fp16 needs a GPU, for its loss scale: launch with --mixed_precision no, or "
            "bf16 on the CPUs that have it"
        )
    yield from find_faults_of_engine(layout.accelerator)
    yield from find_faults_of_dtypes(args, layout.accelerator)
    for hook in hooks(args.EXTRAS, "find_faults"):
        yield from hook(args, layout)


def find_dropped(layout: Layout) -> Iterator[str]:
    """Yield a problem for each thing that was requested and is silently not in force.

    accelerate drops engines and processes (huggingface/accelerate#2741), and without its extra a
    recipe would give ranks that share rows other ones.
    """
    accelerator = layout.accelerator
    processes = os.environ.get("WORLD_SIZE", "1")
    requested = []
    if os.environ.get("ACCELERATE_USE_FSDP") == "true" and fsdp_plugin(accelerator) is None:
        requested.append("FSDP")
    if zero_stage(accelerator) is not None and accelerator.state.backend is None:
        requested.append("DeepSpeed")
    if processes != str(accelerator.num_processes):
        requested.append(f"WORLD_SIZE {processes}")
    if requested:
        yield (
            f"the launcher requested {' and '.join(requested)}, and what runs is "
            f"{layout.strategy} on {accelerator.num_processes} x {accelerator.device.type}: "
            "without GPUs, rehearse it: python scripts/rehearse.py --config_file YAML RECIPE ..."
        )
    for kind in SHARING:
        size = getattr(accelerator.parallelism_config, f"{kind}_size", 1)
        if size != layout.sizes.get(kind, 1):
            yield f"{kind}_size {size}: no extra of this recipe can share rows so: set it to 1"


def find_faults_of_engine(accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem for each setting under which an engine would train something else."""
    plugin = fsdp_plugin(accelerator)
    if plugin is not None and plugin.fsdp_version == 1:
        if not plugin.use_orig_params:
            yield (
                "FSDP1 with fsdp_use_orig_params: false trains nothing, since the optimizer is "
                "made before its flat parameters: set it to true"
            )
        requested = plugin.sharding_strategy.name
        if name_of_fsdp1(accelerator) != requested and accelerator.num_processes > 1:
            yield (
                f"{requested} shards over the GPUs of one host, and here each has one: torch would "
                "neither shard nor average gradients between hosts: use fsdp2_full_shard.yaml"
            )
    config = getattr(accelerator.state.deepspeed_plugin, "deepspeed_config", {})
    doubled = [key for key in OWNED_BY_FLAGS if config.get(key, "auto") not in ("auto", None)]
    if doubled:
        yield (
            f"the command line owns {', '.join(doubled)}: delete that from the YAML, or set it to "
            "auto in the DeepSpeed config"
        )
    if (config.get("tensor_parallel") or {}).get("autotp_size", 1) not in (0, 1):
        yield (
            "tensor_parallel.autotp_size: DeepSpeed's tensor parallelism needs the same rows on "
            "all ranks of a group, and each has its own: delete it, and use fsdp2_tp.yaml"
        )


def find_faults_of_dtypes(args: Any, accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem if bf16 weights would lose updates, or 4-bit weights would be cast."""
    name = name_of_engine(accelerator)
    precision = accelerator.mixed_precision
    # Under mixed precision accelerate keeps what FSDP trains in fp32, and DeepSpeed has master
    # weights of its own.
    has_master_weights = is_sharded(accelerator) and precision != "no"
    trains_bf16 = args.dtype == "bfloat16" and not args.use_peft
    if trains_bf16 and not has_master_weights and not args.no_master_weights:
        yield (
            f"--dtype bfloat16 without adapters: {name} with mixed precision {precision} keeps no "
            "fp32 copy of the weights, and updates below 1/256 of a weight are lost: use --dtype "
            "float32, with which mixed_precision: bf16 computes in bf16 all the same, or "
            "--no_master_weights"
        )
    computes_in = mixed_dtype(accelerator) or args.dtype
    is_4_bit = getattr(args, "load_in_4bit", False)
    if is_4_bit and is_sharded(accelerator) and args.dtype != computes_in:
        yield (
            f"{name} would cast, and so destroy, 4-bit weights that are not stored in what it "
            f"computes in: use --dtype {computes_in}"
        )
