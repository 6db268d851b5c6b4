# SPDX-License-Identifier: Apache-2.0
"""Compare what accelerate runs with what was requested: dropped settings, and what does not fit.

The same rules serve `accelerate launch`, torchrun and scripts/rehearse.py, since they read what
accelerate made of YAML and command line. They cannot see what accelerate has ignored in the YAML:
for that `check_launch` of checks.py reads the file.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Iterator

import torch
from accelerate import Accelerator

from components.deepspeed_builds import find_locked_builds
from components.launch_command import started_one_of_several_processes
from components.mesh import Mesh
from components.mesh_checks import find_mesh_misfits, find_model_misfits
from components.plugins import deepspeed_config
from components.strategy import Strategy, compute_dtype
from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    ExpertAdapterArguments,
)
from core.config_names import find_launch
from core.workarounds import fsdp_plugin

# The sharding key that each version of FSDP ignores, and its forms that are no names
IGNORED_KEY = {1: "fsdp_reshard_after_forward", 2: "fsdp_sharding_strategy"}
FORMS = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP", "1": "FULL_SHARD", "2": "SHARD_GRAD_OP"}
# What the command line of a recipe owns of DeepSpeed's config
OWNED = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
)


def find_strategy_problems(args: CommonArguments, accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem, with its fix, for each thing that the strategy in force forbids."""
    strategy = Strategy.of(accelerator)
    yield from find_dropped_settings(accelerator, strategy)
    yield from find_misfits(args, accelerator, strategy)
    yield from find_model_misfits(args, Mesh.of(accelerator))
    yield from find_problems_of_environment(args, strategy)
    yield from find_locked_builds(accelerator)


# ---- What accelerate dropped ----
def find_missing_device() -> Iterator[str]:
    """Yield a problem if DeepSpeed was requested and there is no GPU.

    `find_dropped_settings` would find it too, but only after DeepSpeed has compiled an op for CPU
    ranks, which takes a minute. scripts/rehearse.py names the CPU as the device, as its ranks need.
    """
    requested = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    named = "ACCELERATE_TORCH_DEVICE" in os.environ
    if requested and not named and not torch.accelerator.is_available():
        yield (
            "the launcher requested more than accelerate runs here: DeepSpeed needs a GPU, and "
            f"none was found; {how_to_rehearse()}; {what_it_does()}"
        )


def what_it_does() -> str:
    """Return the command that shows what the launched YAML really does."""
    return f"what the YAML really does: python scripts/check_config.py {launched_file()}"


def find_dropped_settings(accelerator: Accelerator, strategy: Strategy) -> Iterator[str]:
    """Yield a problem for each setting that accelerate has silently dropped.

    See huggingface/accelerate#2741.
    """
    yield from find_dropped_engine(accelerator, strategy)
    if strategy.fsdp_version > 0:
        yield from find_ignored_sharding(strategy)
        yield from find_lost_shards(accelerator, strategy)


def find_dropped_engine(accelerator: Accelerator, strategy: Strategy) -> Iterator[str]:
    """Yield a problem if FSDP, DeepSpeed or processes were requested and are not in force."""
    if runs_less_than_requested(accelerator, strategy):
        runs = f"{strategy.name} on {accelerator.num_processes} x {accelerator.device.type}"
        if accelerator.device.type == "cpu":
            runs += ", since no GPU was found"
        yield (
            f"the launcher requested more than accelerate runs here, which is {runs}; "
            f"{how_to_rehearse()}; {what_it_does()}"
        )


def find_ignored_sharding(strategy: Strategy) -> Iterator[str]:
    """Yield a problem if the key that this version of FSDP ignores requests another strategy.

    FULL_SHARD, the default of that key, does no harm.
    """
    key = IGNORED_KEY[strategy.fsdp_version]
    requested = os.environ.get(key.upper(), "FULL_SHARD").upper()
    requested = FORMS.get(requested, requested)
    if requested not in ("FULL_SHARD", strategy.sharding):
        yield f"{key} {requested} has no effect, accelerate runs {strategy.name}; {what_it_does()}"


def find_lost_shards(accelerator: Accelerator, strategy: Strategy) -> Iterator[str]:
    """Yield a problem if FSDP1 would shard over the only GPU of each of several hosts."""
    requested = fsdp_plugin(accelerator).sharding_strategy
    runs_whole = strategy.name == "FSDP1 NO_SHARD" and accelerator.num_processes > 1
    if runs_whole and requested.name != "NO_SHARD":
        yield (
            f"{requested.name} shards over the GPUs of one host, and here each host has one: torch "
            "would neither shard nor average gradients between the hosts. Use "
            "fsdp2_full_shard.yaml"
        )


def runs_less_than_requested(accelerator: Accelerator, strategy: Strategy) -> bool:
    """Return whether FSDP, DeepSpeed or processes were requested and are not in force."""
    env = os.environ
    if env.get("ACCELERATE_USE_FSDP") == "true" and strategy.fsdp_version == 0:
        return True
    if strategy.zero_stage is not None and accelerator.state.backend is None:
        return True
    if "WORLD_SIZE" in env:
        return env["WORLD_SIZE"] != str(accelerator.num_processes)
    return accelerator.num_processes > 1 or started_one_of_several_processes()


def launched_file() -> str:
    """Return the launcher's config file, quoted for a shell, or "YAML" if it is not known."""
    launch = find_launch()
    if launch is None or not launch.config_file:
        return "YAML"
    return shlex.quote(str(launch.config_file))


def how_to_rehearse() -> str:
    """Return how to try this launch without GPUs, with the names of its files if known."""
    file = launched_file()
    script = "recipes/RECIPE.py"
    if file != "YAML":
        script = shlex.quote(sys.argv[0])
    return f"without GPUs, rehearse: python scripts/rehearse.py --config_file {file} {script} ..."


# ---- What does not fit ----
def find_misfits(
    args: CommonArguments, accelerator: Accelerator, strategy: Strategy
) -> Iterator[str]:
    """Yield a problem for each argument or key of the YAML that does not fit the strategy.

    Nothing here depends on the machine, so that scripts/plan_memory.py can call it too.

    Args:
        accelerator: only its mixed_precision, num_processes, and the plugins in its state are used.
    """
    yield from find_quantization_misfits(args, accelerator, strategy)
    yield from find_master_weight_misfits(args, accelerator, strategy)
    yield from find_adapter_misfits(args, accelerator, strategy)
    yield from find_mesh_misfits(args, accelerator, strategy)
    plugin = getattr(accelerator.state, "fsdp_plugin", None)  # It is missing without FSDP.
    if plugin is not None and strategy.fsdp_version == 1 and not plugin.use_orig_params:
        yield (
            "FSDP1 with fsdp_use_orig_params: false trains nothing, since the optimizer is made "
            "before its flat parameters: set it to true"
        )
    yield from find_deepspeed_misfits(accelerator, strategy)
    if args.optim.endswith("bit") and strategy.is_sharded:
        yield (
            f"--optim {args.optim} cannot hold the shards of {strategy.name}: use adamw_torch_fused"
        )
    if isinstance(args, DenseModelArguments) and args.torch_compile and strategy.fsdp_version == 1:
        yield (
            f"--torch_compile: accelerate cannot compile the layers of {strategy.name}: use "
            "fsdp2_full_shard.yaml"
        )


def find_quantization_misfits(
    args: CommonArguments, accelerator: Accelerator, strategy: Strategy
) -> Iterator[str]:
    """Yield a problem for each way in which a quantized base does not fit."""
    if not isinstance(args, DenseModelArguments):
        return
    name = strategy.name
    if args.load_in_8bit and strategy.fsdp_version > 0:
        yield f"{name} cannot shard int8 weights: use --load_in_4bit, or int8 with ddp.yaml"
    if not args.load_in_4bit:
        return
    computes_in = compute_dtype(args.dtype, accelerator)
    if strategy.is_sharded and args.dtype != computes_in:
        yield (
            f"{name} would cast, and so destroy, 4-bit weights that are not stored in what it "
            f"computes in: use --dtype {computes_in}"
        )
    if strategy.fsdp_version == 1 and name.endswith(("SHARD_GRAD_OP", "ZERO2")):
        yield (
            f"{name} cannot hold a 4-bit base: use fsdp2_shard_grad_op.yaml or "
            "fsdp1_full_shard.yaml"
        )


def find_master_weight_misfits(
    args: CommonArguments, accelerator: Accelerator, strategy: Strategy
) -> Iterator[str]:
    """Yield a problem if bf16 weights would lose updates, or --no_master_weights has no effect."""
    # Under mixed precision accelerate keeps what FSDP trains in fp32, and DeepSpeed has master
    # weights of its own.
    precision = accelerator.mixed_precision
    has_master_weights = strategy.is_sharded and precision != "no"
    trains_bf16 = args.dtype == "bfloat16" and not args.use_peft
    if trains_bf16 and not has_master_weights and not args.no_master_weights:
        yield (
            f"--dtype bfloat16 without adapters: {strategy.name} with mixed precision {precision} "
            "keeps no fp32 copy of the weights, and updates below 1/256 of a weight are lost, "
            "which at a learning rate of 2e-5 are most: use --dtype float32, with which "
            "mixed_precision: bf16 computes in bf16 all the same, or --no_master_weights"
        )
    if args.no_master_weights and (has_master_weights or not trains_bf16):
        yield (
            "--no_master_weights is for --dtype bfloat16 without --use_peft where the strategy "
            "keeps no fp32 copy of the weights; here it changes nothing "
            f"({strategy.name}, mixed precision {precision}): leave it out"
        )


def find_adapter_misfits(
    args: CommonArguments, accelerator: Accelerator, strategy: Strategy
) -> Iterator[str]:
    """Yield a problem for each kind of adapters that the strategy cannot train or save."""
    if strategy.fsdp_version != 1:
        return
    name = strategy.name
    if isinstance(args, DenseModelArguments) and args.use_dora:
        yield (
            f"{name} gives DoRA flattened parts of weights, whose norms it cannot compute: use an "
            "fsdp2 YAML, or leave out --use_dora"
        )
    if not args.use_peft:
        return
    if name == "FSDP1 NO_SHARD":
        yaml = "single.yaml" if accelerator.num_processes == 1 else "ddp.yaml"
        yield (
            f"{name} no longer lists frozen weights after the first step: use {yaml}, which "
            "holds the same"
        )
    if isinstance(args, ExpertAdapterArguments) and args.lora_target_parameters:
        yield (
            f"{name} gathers adapters only if they are layers of their own, which those of experts "
            "are not: use an fsdp2 YAML, or --lora_target_parameters without a value"
        )


def find_deepspeed_misfits(accelerator: Accelerator, strategy: Strategy) -> Iterator[str]:
    """Yield a problem for each key of DeepSpeed's config that the recipes cannot run with."""
    config = deepspeed_config(accelerator)
    size = (config.get("tensor_parallel") or {}).get("autotp_size")
    if isinstance(size, int) and size > 1:
        yield (
            "tensor_parallel.autotp_size: DeepSpeed's tensor parallelism needs the same rows on "
            "all ranks of a group, and each rank has rows of its own: delete it from the DeepSpeed "
            "config, and use fsdp2_tp.yaml"
        )
    doubled = [key for key in OWNED if config.get(key, "auto") != "auto"]
    if doubled:
        yield (
            f"the command line owns {', '.join(doubled)}: delete that from the YAML, or set it to "
            "auto in the DeepSpeed config"
        )


def find_problems_of_environment(args: CommonArguments, strategy: Strategy) -> Iterator[str]:
    """Yield a problem for each setting in the environment that cannot work here."""
    env = os.environ
    sizes = {}
    for kind in ("DP_SHARD", "CP", "SP", "TP"):
        sizes[kind] = int(env.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1))
    shards_by_mesh = strategy.fsdp_version == 2 or sizes["SP"] > 1
    if sizes["DP_SHARD"] > 1 and not shards_by_mesh:
        yield (
            f"{strategy.name} does not shard by a mesh: set dp_shard_size to 1, or use an "
            "fsdp2 YAML"
        )
    has_engine = strategy.fsdp_version > 0 or strategy.zero_stage is not None
    shares_rows = max(sizes["TP"], sizes["CP"], sizes["SP"]) > 1
    if shares_rows and not has_engine and not strategy.is_split:
        yield (
            f"{strategy.name} splits neither matrices nor rows: set tp_size, cp_size and sp_size "
            "to 1, or use a YAML that does, such as tp.yaml, fsdp2_cp.yaml or "
            "deepspeed_ulysses.yaml"
        )
    compiles_by_yaml = env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO"
    if isinstance(args, DenseModelArguments) and args.torch_compile and compiles_by_yaml:
        yield (
            "--torch_compile and dynamo_config in the YAML: the command line owns it, delete the "
            "latter"
        )
    offloads = env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu"
    has_compiler = shutil.which("ninja") and shutil.which("c++")
    if offloads and "DS_ACCELERATOR" not in env and not has_compiler:
        yield (
            "DeepSpeed compiles its CPU optimizer at first use: put ninja (pip install ninja) and "
            "a C++ compiler (g++) on the PATH"
        )
