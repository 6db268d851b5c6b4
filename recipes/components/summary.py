# SPDX-License-Identifier: Apache-2.0
"""The start summary of a run: what is really in force, and one row as the model sees it.

run.json has the same lines, all arguments and versions. A dry run ends after the summary, with the
disk space that is needed and the command that plans the memory.
"""

import contextlib
import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator, DistributedType

from components import folder
from components.arguments import (
    CommonArguments,
    CompileArguments,
    LengthArguments,
    LigerArguments,
    QuantizationArguments,
)
from components.ending import conclude, end_all_ranks, leave_group
from components.launch_command import find_readable_launch
from components.learning_rate import is_low_for_adapters, rate_for_adapters
from components.mesh import Mesh
from components.model_checks import share_of_experts, size_of
from components.optimizer import warmup_steps
from components.shell_text import folded
from components.status import Ending
from components.strategy import Strategy, compute_dtype
from core.exits import Exit
from core.workarounds import mixed_dtype

GIB = 2**30
WIDTH = 80  # columns of a line on the screen
INDENT = 13  # columns before the text of a line of the summary
WARNING = "warning"  # The name of the last line, to which a recipe's notes may add
LAST_NOTES = ("sample", "packing")  # A sample may take several lines.
LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "peft", "bitsandbytes", "deepspeed")
LAUNCHERS_VARIABLES = ("ACCELERATE_", "FSDP_", "PARALLELISM_")
SECRETS = ("TOKEN", "KEY", "SECRET", "PASS")
NOTABLE_PADDING = 0.05  # A larger share of padding in shards is a warning
WEIGHT_BYTES = 4  # Per trained element in a checkpoint without optimizer state
CHECKPOINT_BYTES = 12  # Per trained element: the weight and two moments, in fp32


@dataclass(frozen=True)
class ModelSize:
    """The number of elements of a model's whole weights, even if they are split or packed.

    Attributes:
        total: the number in all weights.
        trained: the number in those that are trained.
    """

    total: int
    trained: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> "ModelSize":
        """Return the size of a model."""
        total = trained = 0
        for weight in model.parameters():
            size = size_of(weight)
            total += size
            if weight.requires_grad:
                trained += size
        return cls(total, trained)


def summarize(
    accelerator: Accelerator,
    args: CommonArguments,
    model: torch.nn.Module,
    notes: Mapping[str, str],
    identity: Mapping[str, Any],
    total_steps: int,
    planned_row: int | None = None,
) -> None:
    """Print what is in force, and write it to run.json. Every rank takes part.

    A dry run writes nothing and ends here: with 0, or with 73 if the disk has too little space.

    Args:
        notes: the recipe's lines of the summary by their names: always "batch", and others such as
            rows, the loss, "sample", one row as it is trained on, and "warning".
        identity: `rows_per_step` and `data`, which are compared when the run resumes.
        total_steps: optimizer steps of the run.
        planned_row: tokens of the longest row, with which scripts/plan_memory.py can plan the
            memory; None if it does not know the recipe's models.
    """
    size = ModelSize.of(model)
    lines = summary_lines(accelerator, args, model, size, notes, total_steps)
    if accelerator.is_main_process:
        print("\n".join(wrapped(name, text) for name, text in lines.items()), flush=True)
        if not args.dry_run:
            write_run_json(args, lines, identity)
    if args.dry_run:
        end_dry_run(accelerator, args, size, planned_row)


# ---- Lines ----
def summary_lines(
    accelerator: Accelerator,
    args: CommonArguments,
    model: torch.nn.Module,
    size: ModelSize,
    notes: Mapping[str, str],
    total_steps: int,
) -> dict[str, str]:
    """Return the lines of the summary by their names, in order."""
    strategy = Strategy.of(accelerator)
    lines = {}
    warning = unused_gpus(accelerator, strategy)
    if warning:
        lines["WARNING"] = warning
    lines["model"] = f"{args.model_name_or_path}, {size.total:,} parameters"
    lines["trained"] = describe_trained(args, size)
    lines["strategy"] = f"{strategy.name}, {accelerator.num_processes} x {accelerator.device.type}"
    lines["precision"] = (
        f"weights {args.dtype}, mixed precision {accelerator.mixed_precision}, "
        f"quantization {name_of_quantization(args)}"
    )
    lines["kernels"] = ", ".join(kernels_in_use(args, model))
    lines["batch"] = notes["batch"]
    if isinstance(args, LengthArguments):
        lines["length"] = f"at most {args.max_length:,} tokens (--max_length)"
    lines["steps"] = describe_steps(args, total_steps)
    lines["schedule"] = describe_schedule(args, total_steps)
    lines["checkpoints"] = "when the run is stopped"
    if args.save_steps:
        lines["checkpoints"] = f"every {args.save_steps} steps"
    for name, text in notes.items():
        if name not in (*LAST_NOTES, WARNING):
            lines[name] = text
    for name in LAST_NOTES:
        if name in notes:
            lines[name] = notes[name]
    if args.gradient_accumulation_steps > 1 and accelerator.num_processes > strategy.pipeline:
        lines["gradients"] = when_gradients_are_reduced(accelerator, strategy)
    warnings = [notes[WARNING]] if notes.get(WARNING) else []
    warnings += find_hints(accelerator, args, strategy)
    warnings += find_slow_paths(accelerator, args, model)
    warnings += find_larger_shards(accelerator, model, strategy)
    if warnings:
        lines[WARNING] = "\n".join(warnings)
    return lines


def wrapped(name: str, text: str) -> str:
    """Return a line of the summary, continued below its text where it is wider than the screen.

    Words that are wider, such as paths, are kept whole, so that they can be copied.
    """
    parts = []
    for line in text.split("\n"):
        parts += textwrap.wrap(
            line,
            WIDTH - INDENT,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
        ) or [""]
    continued = "\n" + INDENT * " "
    return f"{name:>{INDENT - 2}}: {continued.join(parts)}".rstrip()


def describe_trained(args: CommonArguments, size: ModelSize) -> str:
    """Return what is trained, and its share of all parameters."""
    what = "weights"
    if args.use_peft:
        what = "LoRA adapters"
    elif size.trained == size.total:
        return "all weights"
    share = size.trained / size.total
    return f"{what}, {size.trained:,} parameters ({share:.2%} of all)"


def describe_steps(args: CommonArguments, total_steps: int) -> str:
    """Return how long the run is."""
    if args.max_steps > 0:
        return f"{total_steps:,} (--max_steps)"
    if args.num_train_epochs is None:
        return f"{total_steps:,}"
    epochs = "1 epoch" if args.num_train_epochs == 1 else f"{args.num_train_epochs:g} epochs"
    return f"{total_steps:,} in {epochs}"


def describe_schedule(args: CommonArguments, total_steps: int) -> str:
    """Return the peak of the learning rate and how it changes."""
    text = f"learning rate {args.learning_rate:g}, {args.lr_scheduler_type}"
    warmup = warmup_steps(args, total_steps)
    if warmup >= total_steps:
        return f"{text}, {warmup:,} warmup steps: a run of {total_steps:,} never reaches it"
    if warmup:
        return f"{text}, {warmup:,} warmup steps"
    return f"{text}, no warmup"


def name_of_quantization(args: CommonArguments) -> str:
    """Return the number format of a quantized base, or "no"."""
    if isinstance(args, QuantizationArguments):
        if args.load_in_8bit:
            return "int8"
        if args.load_in_4bit:
            return args.bnb_4bit_quant_type
    return "no"


def kernels_in_use(args: CommonArguments, model: Any) -> list[str]:
    """Return the kernels that the model computes with."""
    kernels = [f"attention {model.config._attn_implementation}"]
    if isinstance(args, CompileArguments) and args.torch_compile:
        kernels.append("torch.compile of each kind of layer")
    if isinstance(args, LigerArguments) and args.use_liger_kernel:
        kernels.append("Liger")
    if args.tf32:
        kernels.append("TF32")
    return kernels


def when_gradients_are_reduced(accelerator: Accelerator, strategy: Strategy) -> str:
    """Return how often the gradients of an accumulated step are reduced between ranks."""
    reduces_each = accelerator.gradient_state.plugin_kwargs.get("sync_each_batch")
    if reduces_each or strategy.zero_stage in (2, 3):
        return "reduced in each micro-batch, so that no rank holds them whole"
    if strategy.shards_stages:
        return "reduced after each batch, so that no rank holds them whole"
    return "reduced once per step"


# ---- What could be better ----
def find_hints(accelerator: Accelerator, args: CommonArguments, strategy: Strategy) -> list[str]:
    """Return a line, with the flag to pass, for each default that does not suit adapters."""
    hints = []
    if is_low_for_adapters(args):
        hints.append(
            f"a learning rate of {args.learning_rate:g} is low for adapters: "
            f"pass --learning_rate {rate_for_adapters(args):g}"
        )
    if could_halve_the_base(accelerator, args, strategy):
        dtype = mixed_dtype(accelerator) or "bfloat16"
        hints.append(
            f"the frozen base is loaded in float32: pass --dtype {dtype} to halve its memory"
        )
    return hints


def could_halve_the_base(
    accelerator: Accelerator, args: CommonArguments, strategy: Strategy
) -> bool:
    """Return whether a frozen base takes more memory than training adapters needs.

    DeepSpeed casts the model to mixed precision by itself. A CPU without mixed precision computes
    faster in fp32.
    """
    mixed = mixed_dtype(accelerator)
    if not args.use_peft or args.dtype != "float32":
        return False
    if strategy.zero_stage is not None and mixed:
        return False
    return accelerator.device.type != "cpu" or mixed is not None


def unused_gpus(accelerator: Accelerator, strategy: Strategy) -> str | None:
    """Return a warning if a YAML for several processes leaves GPUs of this host unused, or None.

    The shipped YAMLs start one process by default. GPUs that CUDA_VISIBLE_DEVICES hides do not
    count.
    """
    here = accelerator.num_processes
    if "LOCAL_WORLD_SIZE" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = torch.cuda.device_count()
    meant_for_one = accelerator.distributed_type == DistributedType.NO
    if accelerator.device.type != "cuda" or meant_for_one or here >= gpus:
        return None
    used = f"1 of {gpus} GPUs is used" if here == 1 else f"{here} of {gpus} GPUs are used"
    if accelerator.num_processes == 1 and strategy.is_sharded:
        used += ", and nothing is sharded"
    hosts = accelerator.num_processes // here
    if hosts > 1:
        used += " on each host"
    cure = f"pass --num_processes {hosts * gpus} to accelerate launch"
    if getattr(accelerator.parallelism_config, "dp_replicate_size", 1) > 1:
        cure += " and enlarge the mesh in the YAML to match"
    return f"{used}: {cure}"


def find_slow_paths(
    accelerator: Accelerator, args: CommonArguments, model: torch.nn.Module
) -> list[str]:
    """Return a line, with the fix, for each thing that runs much slower than it could."""
    computes_in = args.dtype
    # FSDP and ZeRO cast weights to mixed precision; autocast casts no experts (pytorch#174763).
    if Strategy.of(accelerator).is_sharded:
        computes_in = compute_dtype(args.dtype, accelerator)
    if accelerator.device.type != "cuda" or computes_in == "bfloat16":
        return []
    if share_of_experts(model) < 0.1:
        return []
    # torch.nn.functional.grouped_mm has a kernel for bf16 only. Other dtypes are slow but correct,
    # and fine for small models and comparisons in fp32: this is reported and not refused.
    return [
        f"SLOW: the experts are multiplied in {computes_in}, for which torch has no grouped"
        " kernel, and so one after another: use --dtype bfloat16 --use_peft, or, to train all"
        " weights, an fsdp2 YAML, also on one GPU: its mixed precision casts them to bf16"
    ]


def find_larger_shards(
    accelerator: Accelerator, model: torch.nn.Module, strategy: Strategy
) -> list[str]:
    """Return a line if experts make shards notably larger than the number of ranks promises.

    FSDP2 cuts each weight along its first dimension, and fills all parts up to one size
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py, _init_sharded_param). The first dimension
    of experts is their number, and ranks beyond it hold as much again.
    """
    mesh = Mesh.of(accelerator)
    num_ranks = mesh.dp_shard * mesh.cp
    if strategy.fsdp_version != 2 or mesh.tp > 1 or mesh.pp > 1:
        return []
    if share_of_experts(model) < 0.1:  # Other weights have more rows than there are ranks.
        return []
    whole = held = 0
    for weight in model.parameters():
        if weight.dim() and weight.numel():
            whole += weight.numel()
            rows = len(weight)
            held += math.ceil(rows / num_ranks) * (weight.numel() // rows)
    if held * num_ranks <= (1 + NOTABLE_PADDING) * whole:
        return []
    hint = (
        f"each rank holds 1/{whole / held:.1f} of the weights and not 1/{num_ranks}, since FSDP2"
        " cuts a weight along its first dimension, and that of experts is their number"
    )
    if mesh.ep > 1:  # Other engines cannot spread experts.
        return [hint]
    return [f"{hint}: fsdp1_full_shard.yaml and deepspeed_zero3.yaml cut all weights evenly"]


# ---- run.json ----
def write_run_json(
    args: CommonArguments, lines: Mapping[str, str], identity: Mapping[str, Any]
) -> None:
    """Write summary, arguments, environment and versions of the run to OUTPUT_DIR/run.json."""
    run = {
        "summary": lines,
        "command": sys.argv,
        "arguments": vars(args),
        **identity,
        "loss_unit": args.LOSS_UNIT,
        "launch": launchers_variables(),
        "versions": versions(),
    }
    Path(args.output_dir, folder.RUN).write_text(json.dumps(run, indent=2))


def launchers_variables() -> dict[str, str]:
    """Return the environment variables that the launcher has set, without secrets."""
    found = {}
    for name, value in os.environ.items():
        is_secret = any(word in name for word in SECRETS)
        if name.startswith(LAUNCHERS_VARIABLES) and not is_secret:
            found[name] = value
    return found


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries, whether or not the run needs them."""
    found = {}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


# ---- Dry run ----
def end_dry_run(
    accelerator: Accelerator, args: CommonArguments, size: ModelSize, planned_row: int | None
) -> NoReturn:
    """Print the disk space that is needed and how to plan the memory, and end all ranks.

    The exit code is 0, or 73 if the disk has too little space.
    """
    needed = bytes_on_disk(args, size)
    free = shutil.disk_usage(folder.nearest_folder(args.output_dir)).free
    disk = (
        f"checkpoints and result take up to {needed / GIB:.3g} GiB, "
        f"{free / GIB:,.0f} GiB are free in {args.output_dir}"
    )
    accelerator.print(wrapped("disk", disk), flush=True)
    if needed > free:
        end_all_ranks(
            accelerator,
            Exit.CANNOT_WRITE,
            f"{needed:,} bytes are needed for checkpoints and result, {free:,} are free in "
            f"{args.output_dir}: lower --save_total_limit, or choose another --output_dir",
        )
    if planned_row is not None:
        words = plan_command(accelerator, planned_row)
        command = folded(words, WIDTH - INDENT)
        accelerator.print(f"{'plan':>{INDENT - 2}}: {command}")
    accelerator.print(
        "Dry run: all of this fits together; nothing was trained or written.", flush=True
    )
    conclude(accelerator, Ending.done())
    leave_group(accelerator)
    sys.exit(Exit.DONE)


def bytes_on_disk(args: CommonArguments, size: ModelSize) -> int:
    """Return the bytes of checkpoints and result. While one is written, all older ones are kept.

    So is one that is being uploaded.
    """
    checkpoints = args.save_total_limit + 1
    if args.output_url:
        checkpoints += 1
    if args.load_best_model_at_end:
        checkpoints += 1
    result = 4 * size.trained
    if not args.use_peft:
        result = getattr(torch, args.dtype).itemsize * size.total
    weights_only = 0
    if args.save_only_model:  # All but one, which is written when the run is stopped
        weights_only = checkpoints - 1
        checkpoints = 1
    per_element = CHECKPOINT_BYTES * checkpoints + WEIGHT_BYTES * weights_only
    return per_element * size.trained + result


def plan_command(accelerator: Accelerator, longest_row: int) -> list[str]:
    """Return the words of the launch command with scripts/plan_memory.py in place of the launcher.

    That prints how much of each GPU's memory the run takes.
    """
    words: dict[str, Any] = {
        "--config_file": "YAML",
        "--num_processes": accelerator.num_processes,
    }
    launch = find_readable_launch()
    if launch is not None:
        if launch.config_file:
            words["--config_file"] = launch.config_file
        for name in ("num_machines", "mixed_precision"):
            if name in launch.given:
                words[f"--{name}"] = launch.given[name]
    options = [str(word) for option in words.items() for word in option]
    recipe = [sys.argv[0], *(word for word in sys.argv[1:] if word != "--dry_run")]
    return ["python", "scripts/plan_memory.py", *options, "--longest", str(longest_row), *recipe]
