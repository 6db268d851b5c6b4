"""What is checked before anything is loaded: arguments, pairs of them, and what accelerate runs against what was asked.

Every recipe uses this file when it lies beside it; a recipe that was copied alone starts unchecked. All problems are
found at once, each with its cure. The same rules serve `accelerate launch`, torchrun and scripts/rehearse.py, since they
read what accelerate made of YAML and command line. What accelerate has ignored in the YAML cannot be seen there: where
accelerate's launcher has read a file, that file is checked before all else (components/launch_command.py).
"""

import contextlib
import difflib
import inspect
import json
import math
import os
import re
import shlex
import shutil
import sys
import time
from importlib import metadata
from itertools import groupby
from pathlib import Path
from unittest import mock

import numpy as np
import psutil
import torch
from accelerate import DistributedType
from accelerate.utils import compare_versions
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn import Embedding
from transformers import AutoConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.pytorch_utils import Conv1D

import varlen
from components.launch_command import find_launch, find_launch_faults
from fault_tolerance import RANK, conclude, fail, leave, nearest_folder
from rows import OFFLINE
from whole_state import running_statistics, strategy_in_force

REHEARSE = (
    "without GPUs, rehearse: python scripts/rehearse.py --config_file YAML recipes/RECIPE.py ..."
)
OTHER_HEAD = "under ZeRO-3 transformers changes no head to another number of classes: take another YAML, or a model without this head"
MAY_BE_ZERO = "warmup_steps weight_decay max_grad_norm seed lora_dropout dataloader_num_workers save_steps nonfinite_budget num_eval_documents router_aux_loss_coef".split()
# Arguments that may differ when a run goes on, since they change nothing that is learnt; the rows of a step stay equal
FREE_TO_CHANGE = frozenset(
    """
    output_dir dry_run resume_from_checkpoint allow_change save_steps save_total_limit nonfinite nonfinite_budget ddp_timeout eval_strategy eval_steps eval_on_start
    eval_dataset_name dataset_test_split max_eval_tokens per_device_eval_batch_size logging_steps report_to dataset_num_proc dataloader_num_workers
    per_device_train_batch_size gradient_accumulation_steps gradient_checkpointing attn_implementation padding_free torch_compile use_liger_kernel max_logits_mib
    no_master_weights precompute_ref_log_probs predict_with_generate generation_max_length generation_num_beams""".split()
)
OLD_LOCK = 5  # minutes; DeepSpeed's ops are built in one or two
COMPILERS = frozenset("ninja c++ g++ gcc clang clang++ cc1plus nvcc cicc ptxas hipcc icpx".split())
TAKE_ADAPTERS = (  # of LoRA in peft; bitsandbytes' quantized layers are linear layers too
    torch.nn.Linear,
    Conv1D,
    Embedding,
    torch.nn.Conv1d,
    torch.nn.Conv2d,
    torch.nn.Conv3d,
    torch.nn.MultiheadAttention,
)
KERNELS = {
    "flash_attention_2": "flash-attn",
    "flash_attention_3": "flash-attn-3",
    "flash_attention_4": "flash-attn-4",
}  # and their packages


@contextlib.contextmanager
def loading(what, name, args=None):
    """Fail with 64 if the tokenizer (of images: processor) or the model of a folder or hub id cannot be read, with 69 if the hub is
    missing: the former comes first. With --dry_run the model has no weights, only their shapes."""
    try:
        with without_weights() if args and args.dry_run else contextlib.nullcontext():
            yield
    except Exception as error:  # each reader of weights has its own
        if what == "tokenizer" and Path(name).is_dir() and not has_tokenizer_files(name):
            fail(
                64,
                f"{name}: no tokenizer in this folder:"
                " copy tokenizer.json and tokenizer_config.json of the base model into it",
            )
        at_hub = (
            what != "model"
            and isinstance(error, (OSError, ValueError))
            and not (Path(name).exists() or name.startswith((".", "/")))
        )
        other_head = "ignore_mismatched_sizes" in str(error)  # though it was given
        fail(
            69 if at_hub else 64,
            f"{name}: no {what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}",
            *[OFFLINE] * at_hub,
            *[OTHER_HEAD] * other_head,
        )


def has_tokenizer_files(folder):
    """Whether any file in the folder could be one that a tokenizer is read from."""
    beginnings = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece")
    for path in Path(folder).iterdir():
        if path.name.startswith(beginnings) or path.suffix in (".model", ".tiktoken", ".bpe"):
            return True
    return False


@contextlib.contextmanager
def without_weights():
    """Let from_pretrained of every AutoModel, each of which has its own, make a model of its config, on the meta device."""

    def of_config(
        kind,
        name,
        dtype,
        attn_implementation,
        quantization_config=None,
        output_loading_info=False,
        ignore_mismatched_sizes=False,
        device_map=None,
        **config,
    ):
        with torch.device("meta"):
            model = kind.from_config(
                AutoConfig.from_pretrained(name, **config),
                dtype=dtype,
                attn_implementation=attn_implementation,
            )
        return (
            (model, {"missing_keys": [], "mismatched_keys": []}) if output_loading_info else model
        )

    with contextlib.ExitStack() as patches:
        for kind in _BaseAutoModelClass.__subclasses__():
            patches.enter_context(
                mock.patch.object(kind, "from_pretrained", classmethod(of_config))
            )
        yield


def check_launch(args):
    """Fail with 64 if the launcher's config file has faults: keys that accelerate would ignore, or
    that these recipes do not run under. Every rank calls it, before it makes its Accelerator, and
    finds the same."""
    errors, warnings = find_launch_faults()
    if RANK == 0:
        for warning in warnings:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    if errors:
        fail(64, *errors, *[problem for broken, problem in rules_of_values(args) if broken])


def find_problems(args, accelerator):
    """Return all that forbids the run, as lines for the user; [] if nothing does."""
    strategy = strategy_in_force(accelerator)
    rules = [
        *rules_of_values(args),
        *check_strategy(accelerator, strategy),
        *rules_of_strategy(args, accelerator, strategy),
        *rules_of_device(args, accelerator),
    ]
    rules += rules_of_builds(accelerator)
    return [problem for broken, problem in rules if broken]


def check_strategy(accelerator, strategy):
    """Yield what the launcher was asked for and accelerate dropped without a word (huggingface/accelerate#2741)."""
    env, (name, fsdp, zero), ranks = os.environ, strategy, str(accelerator.num_processes)
    cure = (
        f"; what the YAML really does: python scripts/check_config.py {launched_file() or 'YAML'}"
    )
    fsdp_dropped = env.get("ACCELERATE_USE_FSDP") == "true" and not fsdp
    deepspeed_dropped = zero >= 0 and accelerator.state.backend is None
    ranks_asked = env.get("WORLD_SIZE", "several" if told_of_several() else "1")
    dropped = fsdp_dropped or deepspeed_dropped or ranks_asked != ranks
    runs = f"{name} on {ranks} x {accelerator.device.type}"
    if accelerator.device.type == "cpu":
        runs += ", since no GPU was found"
    told = f"the launcher was asked for more than accelerate runs here, which is {runs}"
    yield dropped, f"{told}; {rehearsal()}{cure}"
    key = {1: "fsdp_reshard_after_forward", 2: "fsdp_sharding_strategy"}.get(
        fsdp, ""
    )  # the one of two that this version ignores; its default means FULL_SHARD
    asked = {"true": "FULL_SHARD", "1": "FULL_SHARD", "false": "SHARD_GRAD_OP"}.get(
        env.get(key.upper()), env.get(key.upper(), "FULL_SHARD").upper()
    )
    yield (
        asked not in ("FULL_SHARD", name.split()[-1]),
        f"{key} {asked} has no effect, accelerate runs {name}{cure}",
    )
    if fsdp == 1 and accelerator.num_processes > 1 and name == "FSDP1 NO_SHARD":
        asked = accelerator.state.fsdp_plugin.sharding_strategy.name
        yield (
            asked != "NO_SHARD",
            (
                f"{asked} shards over the GPUs of one host, and here each host has one: torch would neither shard nor average "
                "gradients between the hosts. Use fsdp2_full_shard.yaml"
            ),
        )


def launched_file():
    """Return the name of the file that the launcher was given, as a word of a shell, or None where it is not known."""
    with contextlib.suppress(ValueError):
        launch = find_launch()
        if launch and launch.config_file:
            return shlex.quote(str(launch.config_file))
    return None


def rehearsal():
    """How to try this launch without GPUs, with the names of its files where they are known."""
    file = launched_file()
    if file is None:
        return REHEARSE
    return REHEARSE.replace("YAML recipes/RECIPE.py", f"{file} {shlex.quote(sys.argv[0])}")


def told_of_several():
    """Whether accelerate's launcher was told of several processes and started this one alone: its only trace is an address that itself did not have."""
    try:
        launcher = psutil.Process().parent()
        command, before = launcher.cmdline(), launcher.environ()
    except (psutil.Error, AttributeError, OSError):  # ended, or of another user
        return False
    by_accelerate = any(
        re.fullmatch(r"(.*/)?accelerate(-launch)?|accelerate\.commands\.\w+", word)
        for word in command
    )
    return (
        by_accelerate
        and "ACCELERATE_USE_CPU" in os.environ
        and any(os.environ.get(name) != before.get(name) for name in ("MASTER_ADDR", "MASTER_PORT"))
    )


def rules_of_values(args):
    """Yield (broken, problem) of single values, and of pairs of them."""
    for name, value in vars(args).items():
        if type(value) in (int, float) and name != "max_steps":
            fine = 0 < value < math.inf or value == 0 and name in MAY_BE_ZERO
            yield (
                not fine,
                f"--{name} {value}: must be {'0 or more' if name in MAY_BE_ZERO else 'above 0'}",
            )
    model, resume = Path(args.model_name_or_path), args.resume_from_checkpoint
    quantized = [f"--{name}" for name in ("load_in_8bit", "load_in_4bit") if vars(args)[name]]
    of_adapters = [f"--{name}" for name in ("use_rslora", "use_dora") if vars(args)[name]]
    unknown = set(args.allow_change) - set(vars(args)) - {"data"}
    yield args.load_in_8bit and args.load_in_4bit, "--load_in_8bit and --load_in_4bit: choose one"
    yield (
        quantized and not args.use_peft,
        (
            f"{' and '.join(quantized)}: a quantized base cannot be trained itself:"
            " add --use_peft to train adapters on it"
        ),
    )
    yield (
        of_adapters and not args.use_peft,
        (f"{' and '.join(of_adapters)}: for adapters only: add --use_peft"),
    )
    yield args.lora_dropout >= 1, f"--lora_dropout {args.lora_dropout}: must be below 1"
    of_parameters = args.use_peft and getattr(args, "lora_target_parameters", None)
    yield (
        of_parameters and args.lora_dropout > 0,
        "--lora_dropout is for adapters of linear layers (peft): leave it out, or --lora_target_parameters with nothing behind it leaves the others out",
    )
    yield (
        args.dtype == "float16" and not args.use_peft,
        "float16 weights cannot be trained, for want of an fp32 master copy: use --dtype float32 with mixed_precision: fp16 in the YAML",
    )
    # A hub id has no leading dot or slash, and one slash at most
    name = args.model_name_or_path
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    yield is_path and not model.exists(), f"--model_name_or_path {model}: no such folder"
    yield (
        model.exists() and not (model / "config.json").is_file(),
        f"--model_name_or_path {model}: no config.json in it",
    )
    yield Path(args.output_dir).is_file(), f"--output_dir {args.output_dir}: is a file"
    yield (
        resume not in ("auto", "none") and not Path(resume).is_dir(),
        f"--resume_from_checkpoint {resume}: neither auto nor none nor a folder",
    )
    yield unknown, f"--allow_change {' '.join(sorted(unknown))}: not the name of an argument"
    yield (
        len(getattr(args, "text_columns", None) or []) > 2,
        "--text_columns: name one column, or the two of a pair",
    )
    if "max_train_tokens" in args:
        yield (
            args.num_eval_documents and args.eval_dataset_name,
            "--num_eval_documents and --eval_dataset_name: choose one",
        )
    if "packing" not in args:
        return
    yield (
        args.packing and args.padding_free,
        "--packing and --padding_free: choose one; packed rows have next to no padding",
    )
    yield (
        args.packing and args.train_sampling_strategy == "group_by_length",
        "--train_sampling_strategy group_by_length is for rows that are padded, and packed ones are all of one length: use random",
    )


def compute_dtype(args, accelerator):
    """Return the name of the dtype of matrix products: mixed precision's, or else the weights' own."""
    return {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision, args.dtype)


def rules_of_strategy(args, accelerator, strategy):
    """Yield (broken, problem) of arguments that do not fit what accelerate runs."""
    env, (name, fsdp, zero), state = os.environ, strategy, accelerator.state
    sharded, of_deepspeed = (
        fsdp or zero >= 0,
        getattr(state.deepspeed_plugin, "deepspeed_config", {}),
    )
    computes_in = compute_dtype(args, accelerator)
    no_compiler = "DS_ACCELERATOR" not in env and not (
        shutil.which("ninja") and shutil.which("c++")
    )
    meshes = ["TP", "CP", "SP"] + ["DP_SHARD"] * (fsdp != 2)
    doubled = [
        key
        for key in "gradient_accumulation_steps gradient_clipping train_batch_size train_micro_batch_size_per_gpu optimizer scheduler".split()
        if of_deepspeed.get(key, "auto") != "auto"
    ]
    yield (
        env.get("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE") == "cpu" and no_compiler,
        "DeepSpeed compiles its CPU optimizer at first use: put ninja (pip install ninja) and a C++ compiler (g++) on the PATH",
    )
    yield (
        args.load_in_8bit and fsdp,
        f"{name} cannot shard int8 weights: use --load_in_4bit, or int8 with ddp.yaml",
    )
    yield (
        args.load_in_4bit and sharded and args.dtype != computes_in,
        f"{name} would cast, and so destroy, 4-bit weights that are not stored in what it computes in: use --dtype {computes_in}",
    )
    # FSDP keeps what it trains in fp32 under mixed precision (accelerate), DeepSpeed has master weights of its own
    has_master = bool(sharded) and accelerator.mixed_precision != "no"
    full_bf16 = args.dtype == "bfloat16" and not args.use_peft
    yield (
        full_bf16 and not has_master and not args.no_master_weights,
        (
            f"--dtype bfloat16 without adapters: {name} with mixed precision {accelerator.mixed_precision} keeps no fp32 copy "
            "of the weights, and updates below 1/256 of a weight are lost, which at a learning rate of 2e-5 are most: use "
            "--dtype float32, with which mixed_precision: bf16 computes in bf16 all the same, or --no_master_weights"
        ),
    )
    yield (
        args.no_master_weights and (has_master or not full_bf16),
        (
            "--no_master_weights is for --dtype bfloat16 without --use_peft where the strategy keeps no fp32 copy of the "
            f"weights; here it changes nothing ({name}, mixed precision {accelerator.mixed_precision}): leave it out"
        ),
    )
    yield (
        any(int(env.get(f"PARALLELISM_CONFIG_{kind}_SIZE", 1)) > 1 for kind in meshes),
        f"{name} shards no mesh of this kind: set tp_size, cp_size and sp_size to 1, and dp_shard_size too without FSDP2",
    )
    yield (
        fsdp == 1 and args.use_dora,
        f"{name} hands DoRA flattened parts of weights, of which it cannot take the norms: use an fsdp2 YAML, or leave out --use_dora",
    )
    yield (
        fsdp == 1 and not state.fsdp_plugin.use_orig_params,
        "FSDP1 with fsdp_use_orig_params: false trains nothing, since the optimizer is made before its flat parameters: set it to true",
    )
    yield (
        zero == 3
        and of_deepspeed["zero_optimization"].get("stage3_gather_16bit_weights_on_model_save")
        is not True,
        f"{name} could not save the weights in the end: set zero3_save_16bit_model: true in the YAML, or stage3_gather_16bit_weights_on_model_save in the DeepSpeed config",
    )
    yield (
        doubled,
        f"the command line owns {', '.join(doubled)}: delete that from the YAML, or set it to auto in the DeepSpeed config",
    )
    yield (
        args.use_peft and name == "FSDP1 NO_SHARD",
        f"{name} loses frozen weights when adapters are saved: use {'single.yaml' if accelerator.num_processes == 1 else 'ddp.yaml'}, which holds the same",
    )
    of_parameters = args.use_peft and getattr(args, "lora_target_parameters", None)
    yield (
        of_parameters and fsdp == 1,
        f"{name} gathers adapters in layers of their own alone, which those of experts are not: use an fsdp2 YAML, or --lora_target_parameters with nothing behind it",
    )
    yield (
        args.load_in_4bit and fsdp == 1 and name.endswith(("SHARD_GRAD_OP", "ZERO2")),
        f"{name} cannot hold a 4-bit base: use fsdp2_shard_grad_op.yaml or fsdp1_full_shard.yaml",
    )
    yield (
        args.optim.endswith("bit") and sharded,
        f"--optim {args.optim} cannot hold the shards of {name}: use adamw_torch_fused",
    )
    yield (
        args.torch_compile and fsdp == 1,
        f"--torch_compile: accelerate cannot compile the layers of {name}: use fsdp2_full_shard.yaml",
    )
    yield (
        args.torch_compile and env.get("ACCELERATE_DYNAMO_BACKEND", "NO").upper() != "NO",
        "--torch_compile and dynamo_config in the YAML: the command line owns it, delete the latter",
    )


def rules_of_builds(accelerator):
    """Yield (broken, problem) of a lock that a killed build of a DeepSpeed op left behind.

    torch waits until the lock is gone, without end (torch.utils.file_baton). DeepSpeed builds an op
    at its first use, here that of an optimizer offloaded from a GPU."""
    config = getattr(accelerator.state.deepspeed_plugin, "deepspeed_config", {})
    zero, parts = config.get("zero_optimization", {}), ("offload_optimizer", "offload_param")
    places = [(zero.get(part) or {}).get("device") for part in parts]
    ops = ["cpu_adam"] if places[0] in ("cpu", "nvme") else []
    ops += ["async_io", "pin_memory"] if "nvme" in places else []
    if accelerator.device.type == "cpu":
        return
    for op in ops:
        lock = Path(build_folder(op), "lock")
        try:
            minutes = (time.time() - lock.stat().st_mtime) / 60
        except OSError:  # there is none
            continue
        if minutes < OLD_LOCK and RANK == 0:
            waits = f"warning: DeepSpeed waits until {lock} is gone; if no other run is building"
            print(f"{waits} {op}, delete that file", file=sys.stderr, flush=True)
        stale = minutes >= OLD_LOCK and not compiles()
        left = f"a build of DeepSpeed's {op} was killed {minutes:,.0f} minutes ago and left {lock}"
        yield stale, f"{left}, which this run would wait for without end: delete that file"


def build_folder(op):
    """Where torch builds an extension of this name."""
    from torch.utils.cpp_extension import _get_build_directory  # only here: it loads setuptools

    return _get_build_directory(op, verbose=False)


def compiles():
    """Whether a compiler runs on this host."""
    return any(process.info["name"] in COMPILERS for process in psutil.process_iter(["name"]))


def installed(package):
    """Whether pip knows the package; modules do not tell, since FlashAttention 2 and 4 share one."""
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


def rules_of_device(args, accelerator):
    """Yield (broken, problem) of what needs a GPU, a certain one, or a package that is not there."""
    kernel, device = args.attn_implementation, accelerator.device
    on_cpu, package = device.type == "cpu", "kernels" if "/" in kernel else KERNELS.get(kernel)
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
    wants = {
        "flash_attention_4": (9, 0),
        "flash_attention_3": (9, 0),
        "flash_attention_2": (8, 0),
    }.get(kernel, (0, 0))
    known = sorted(
        name
        for name in {"eager", varlen.NAME, *KERNELS, *ALL_ATTENTION_FUNCTIONS.valid_keys()}
        if "|" not in name
    )
    close = difflib.get_close_matches(kernel, known, 1)
    meaning = f"did you mean {close[0]}? " if close else ""
    yield (
        kernel not in known and "/" not in kernel,
        f"--attn_implementation {kernel}: no attention has this name: {meaning}Available: {', '.join(known)}",
    )
    yield (
        on_cpu and (kernel.startswith("fl") or "/" in kernel),
        f"--attn_implementation {kernel} needs a GPU: use sdpa",
    )
    yield (
        not on_cpu and package and not installed(package),
        f"--attn_implementation {kernel} needs the package {package}: pip install {package}, or use sdpa",
    )
    yield from rules_of_varlen(args, accelerator, capability)
    yield (
        not on_cpu and capability < wants,
        f"--attn_implementation {kernel} needs a GPU of compute capability {wants[0]}.{wants[1]} or more, this one has {capability[0]}.{capability[1]}: use sdpa",
    )
    yield (
        on_cpu and args.optim.startswith("paged"),
        f"--optim {args.optim} pages between GPU and host: use adamw_8bit or adamw_torch_fused",
    )
    liger = "use_liger_kernel" in args and args.use_liger_kernel
    yield on_cpu and liger, "--use_liger_kernel: its Triton kernels need a GPU"
    yield (
        not on_cpu and liger and not installed("liger-kernel"),
        "--use_liger_kernel needs the package liger-kernel: pip install liger-kernel",
    )
    yield (
        args.tf32 and capability < (8, 0),
        "--tf32 needs an NVIDIA GPU of compute capability 8.0 (Ampere) or more",
    )
    # Older transformers computes the angles of rotary positions by an fp32 matrix product. In TF32
    # position 2,049 becomes 2,048 (huggingface/transformers#48428: on a B200, not on an A100). Newer
    # ones multiply elementwise, which is not affected.
    rotates_by_matmul = compare_versions("transformers", "<", "5.19")
    yield (
        args.tf32 and rotates_by_matmul,
        (
            "--tf32: before transformers 5.19 rotary positions above 2,048 can be rounded in TF32:"
            " pip install -U transformers, or leave out --tf32"
        ),
    )
    yield from rules_of_precision(args, accelerator, capability)
    yield (
        args.torch_compile and on_cpu and not shutil.which("c++"),
        "--torch_compile compiles C++ on a CPU: put a compiler (g++) on the PATH",
    )
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        yield (
            capability < (8, 9),
            "mixed_precision: fp8 needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or more: set it to bf16",
        )
        yield (
            getattr(accelerator, "fp8_backend", None) == "TE",
            "fp8_config: backend: TE replaces the output head, in which the loss is computed: use backend: AO (pip install torchao)",
        )
        yield (
            args.use_peft,
            "mixed_precision: fp8 trains whole weights only: set it to bf16, or leave out --use_peft",
        )


def rules_of_precision(args, accelerator, capability):
    """Yield (broken, problem) of dtypes that the GPU or the attention kernel cannot compute in.
    capability: (major, minor) of an NVIDIA GPU, (0, 0) of a CPU."""
    if accelerator.device.type != "cuda":
        return
    computes_in, kernel = compute_dtype(args, accelerator), args.attn_implementation
    # torch.cuda.is_bf16_supported() is true of these GPUs, since bf16 is emulated there, and
    # accelerate believes it. A base stored in bf16 under fp16 is allowed: its matrix products run in
    # fp16. ROCm numbers its GPUs differently.
    emulated = computes_in == "bfloat16" and capability < (8, 0) and not torch.version.hip
    if accelerator.mixed_precision == "bf16":
        cure = "pass --mixed_precision fp16 to accelerate launch"
    else:
        cure = "use --dtype float32, and pass --mixed_precision fp16 to accelerate launch"
    yield (
        emulated,
        (
            f"this GPU (compute capability {capability[0]}.{capability[1]}) has no bf16 hardware"
            f" and would emulate it slowly: {cure}"
        ),
    )
    yield (
        "flash" in kernel and computes_in == "float32",
        (
            f"--attn_implementation {kernel} computes in bf16 and fp16 only:"
            " pass --mixed_precision bf16 to accelerate launch, or use sdpa"
        ),
    )


def rules_of_varlen(args, accelerator, capability):
    """Yield (broken, problem) of --attn_implementation varlen."""
    asked, name = args.attn_implementation == varlen.NAME, f"--attn_implementation {varlen.NAME}"
    if not asked:
        return
    half = accelerator.mixed_precision != "no" or args.dtype != "float32"
    yield (
        "max_logits_mib" not in args,
        f"{name} is for the recipes of causal language models: use sdpa",
    )
    yield accelerator.device.type != "cuda", f"{name} needs an NVIDIA GPU: use sdpa"
    on_gpu = accelerator.device.type == "cuda"
    yield (
        on_gpu and capability < (8, 0),
        f"{name} needs a GPU of compute capability 8.0 or more, this one has {capability[0]}.{capability[1]}: use sdpa",
    )
    yield (
        on_gpu and not varlen.is_available(),
        f"{name} needs torch 2.11 or newer, this is {torch.__version__}: use sdpa",
    )
    yield (
        on_gpu and not half,
        f"{name} computes in bf16 or fp16: launch with --mixed_precision bf16, or use sdpa",
    )


def check_changes(accelerator, args, progress, facts):
    """List what differs from the checkpoint's run; fail with 64 at what changes the run and --allow_change does not name.
    facts: {"rows_per_step": rows of an optimizer step over all ranks, "data": hash of the training rows}"""
    before, now = progress["arguments"], vars(args) | facts
    changed = [name for name in now if now[name] != before.get(name, now[name])]
    for name in changed:
        accelerator.print(
            f"changed since step {progress['step']}: {name} {before[name]} -> {now[name]}",
            flush=True,
        )
    rows, ranks = before["rows_per_step"], accelerator.num_processes
    if rows != now["rows_per_step"]:
        size = next(
            (
                n
                for n in range(min(args.per_device_train_batch_size, rows), 0, -1)
                if rows % (n * ranks) == 0
            ),
            None,
        )
        fix = (
            f"--per_device_train_batch_size {size} --gradient_accumulation_steps {rows // (size * ranks)}"
            if size
            else f"a number of ranks that divides {rows}"
        )
        leave(
            accelerator,
            64,
            f"a step of the checkpoint's run has {rows} rows, here it would have {now['rows_per_step']}: use {fix}",
        )
    if unsafe := [
        name for name in changed if name not in FREE_TO_CHANGE and name not in args.allow_change
    ]:
        leave(
            accelerator,
            64,
            f"the checkpoint's run had other values of {', '.join(unsafe)}, listed above: use those, or --allow_change {' '.join(unsafe)}, or another --output_dir",
        )


def in_one_line(args):
    """Whether the rows of each batch lie in one line without padding, for an attention that is told where each of them ends."""
    kernel = args.attn_implementation
    return "max_logits_mib" in args and (
        "flash" in kernel or kernel == varlen.NAME
    )  # the recipes of causal language models


def shares_lines(args):
    """Whether several rows, or documents of a stream, stand in one line, where none may see another."""
    return (
        "max_train_tokens" in args
        or in_one_line(args)
        or "packing" in args
        and (args.packing or args.padding_free)
    )


def check_model(args, model, largest, longest=0):
    """Fail with 64 where the rows' largest token or the longest one's last position has no embedding, where a model would be quantized in
    small part, where packed rows would see each other, by masks without positions or in layers whose state runs on, and where Liger left the model as it was."""
    if largest >= model.get_input_embeddings().num_embeddings:
        fail(
            64,
            f"the rows have a token {largest}, but the model has no embedding for it: resize its embeddings first",
        )
    inner, stacked = getattr(model, "get_base_model", lambda: model)(), share_of_experts(model)
    if (args.load_in_8bit or args.load_in_4bit) and stacked > 0.5:
        fail(
            64,
            f"bitsandbytes quantizes linear layers alone, and {stacked:.0%} of {type(inner).__name__} are experts, which are none: leave out --load_in_8bit and --load_in_4bit; --dtype bfloat16 halves a frozen base, full_shard and ZeRO-3 split it",
        )
    names = [name.replace(".base_layer", "") for name, _ in model.named_parameters()]
    for end in (args.use_peft and getattr(args, "lora_target_parameters", None)) or []:
        if not any(name.endswith(f".{end}") for name in names):
            fail(
                64,
                f"--lora_target_parameters {end}: no parameter of {type(inner).__name__} ends so",
            )
    tables = [
        module
        for name, module in inner.named_modules()
        if name.endswith("position_embeddings") and isinstance(module, Embedding)
    ]  # not rotary ones
    places = min(
        (table.num_embeddings - (table.padding_idx or -1) - 1 for table in tables), default=longest
    )  # RoBERTa's begin behind padding
    if longest > places:
        fail(
            64,
            f"the longest row has {longest} tokens, but the model has positions for {places}: use --max_length {places}",
        )
    if "max_logits_mib" not in args:  # not a causal language model: each row has a line of its own
        return
    others = set(getattr(inner.config.get_text_config(), "layer_types", None) or []) - {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
    }
    source = inspect.getsource(sys.modules[type(inner.base_model).__module__])
    masks = re.search(
        r'mask\w*\([^)]*position_ids=position_ids|"position_ids": position_ids', source
    )  # OPT and Falcon take them, and mask without
    if args.attn_implementation == varlen.NAME and (problem := varlen.problem_of(inner)):
        fail(
            64,
            f"--attn_implementation {varlen.NAME} is not for {type(inner).__name__}, since {problem}: use sdpa",
        )
    why = ", ".join(sorted(others))
    if not why and not masks:
        why = "its masks know no position_ids"
    calls = re.findall(r"attention_interface\((.*?)\n +\)", source, re.DOTALL)
    if not why and in_one_line(args) and not (calls and all("**kwargs" in call for call in calls)):
        why = "its layers do not tell their attention where rows end"
    if shares_lines(args) and why:
        cure = (
            "use --attn_implementation sdpa"
            if in_one_line(args)
            else "leave out --packing and --padding_free"
        )
        fail(
            64,
            f"{type(inner).__name__} cannot keep the rows of a line apart ({why}): {cure}, or take another model",
        )
    if getattr(args, "use_liger_kernel", False) and not any(
        "liger" in f"{type(module).__module__} {module.forward.__module__}"
        for module in model.modules()
    ):
        fail(
            64, f"--use_liger_kernel: Liger has no kernels for {type(inner).__name__}: leave it out"
        )


def check_adapters(model, names):
    """Fail with 64 where a name in --lora_target_modules fits no layer, or one that takes no adapter; peft does the
    former only if no name fits, and ends in a traceback at the latter.
    names: of layers, or the ends of their paths, or ["all-linear"]."""
    if names == ["all-linear"]:
        return
    linear = set()
    for path, module in model.named_modules():
        if isinstance(module, (torch.nn.Linear, Conv1D)):
            linear.add(path.rpartition(".")[2])
    layers = f"Its linear layers are {', '.join(sorted(linear))}"
    for name in names:
        found = [
            module for path, module in model.named_modules() if f".{path}".endswith(f".{name}")
        ]
        if not found:
            close = difflib.get_close_matches(name, linear, 1)
            meaning = f"did you mean {close[0]}? " if close else ""
            fail(
                64,
                f"--lora_target_modules {name}: no layer of {type(model).__name__} has this name: {meaning}{layers}",
            )
        others = [
            type(module).__name__ for module in found if not isinstance(module, TAKE_ADAPTERS)
        ]
        if others:
            fail(
                64,
                f"--lora_target_modules {name}: this is a {others[0]} of {type(model).__name__}, which takes no "
                f"adapter: {layers}",
            )


def share_of_experts(model):
    """Return the share of the weights that are experts, from 0 to 1: a layer has them in one tensor."""
    experts = total = 0
    for weight in model.parameters():
        size = size_of(weight)
        total += size
        if len(getattr(weight, "ds_shape", weight.shape)) == 3:
            experts += size
    return experts / total


def find_slow_paths(accelerator, args, model):
    """Return what runs much slower than it could, as lines for the user with the cure; or []."""
    _, fsdp, zero = strategy_in_force(accelerator)
    # FSDP and ZeRO cast weights to mixed precision; autocast casts no experts (pytorch#174763)
    casts_weights = fsdp or zero >= 0
    computes_in = compute_dtype(args, accelerator) if casts_weights else args.dtype
    if accelerator.device.type != "cuda" or computes_in == "bfloat16":
        return []
    if share_of_experts(model) < 0.1:
        return []
    # torch.nn.functional.grouped_mm has a kernel for bf16 only. This is slow and not wrong, and fine
    # for small models and for comparisons in fp32: it is told and not refused.
    return [
        f"SLOW: the experts are multiplied in {computes_in}, for which torch has no grouped"
        " kernel, and so one after the other: use --dtype bfloat16 --use_peft, or, to train all"
        " weights, an fsdp2 YAML, also on one GPU: its mixed precision casts them to bf16"
    ]


def check_running_statistics(accelerator, model):
    """Fail with 64 where each rank would have running statistics of its own, of which only rank 0's are saved."""
    name, fsdp, zero = strategy_in_force(accelerator)
    if (fsdp or zero >= 0) and any(running_statistics(model)):
        inner = getattr(model, "get_base_model", lambda: model)()
        fail(
            64,
            f"{type(inner).__name__} has BatchNorm layers, and {name} does not keep their running statistics equal on "
            "all ranks: use ddp.yaml, which does, or single.yaml",
        )


def check_head(accelerator, args, model):
    """Fail with 64 where ranks would gather the adapters of the output head different numbers of times, and wait for one another.

    ZeRO-3 and FSDP1 gather them whenever the head multiplies, which is once a piece of the loss, and each rank has as
    many pieces as its tokens need.
    """
    name, fsdp, zero = strategy_in_force(accelerator)
    if (
        "max_logits_mib" in vars(args)
        and (fsdp == 1 or zero == 3)
        and isinstance(model.get_output_embeddings(), BaseTunerLayer)
    ):
        fail(
            64,
            f"{name} cannot gather adapters of the output head piece by piece: leave it out of --lora_target_modules, "
            "or use ddp.yaml, an fsdp2 YAML or deepspeed_zero2.yaml",
        )


def size_of(weight):
    """Elements of a weight, also of one that ZeRO-3 has split or that bitsandbytes has packed, two to a byte."""
    packed = 2 * weight.element_size() if type(weight).__name__ == "Params4bit" else 1
    return getattr(weight, "ds_numel", weight.numel()) * packed


def marked(row, tokenizer):
    """Return the text of a row with what is learnt of it in [[ ]]."""
    parts = groupby(
        zip(row["input_ids"].tolist(), row["labels"].tolist(), strict=True),
        lambda pair: pair[1] != -100,
    )
    return "".join(
        "[[" * learnt + tokenizer.decode([token for token, _ in pairs]) + "]]" * learnt
        for learnt, pairs in parts
    )


def unused_gpus(accelerator, strategy):
    """Return a warning if the launcher started fewer processes than this host has GPUs although the
    YAML is for several, or None. Shipped YAMLs ask for one process. GPUs that CUDA_VISIBLE_DEVICES
    hides do not count. strategy: its name."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", accelerator.num_processes))
    gpus = torch.cuda.device_count()
    meant_for_one = accelerator.distributed_type == DistributedType.NO
    if accelerator.device.type != "cuda" or meant_for_one or here >= gpus:
        return None
    hosts = accelerator.num_processes // here
    cure = f"pass --num_processes {hosts * gpus} to accelerate launch"
    if getattr(accelerator.parallelism_config, "dp_replicate_size", 1) > 1:
        cure += " and enlarge the mesh in the YAML to match"
    used = f"1 of {gpus} GPUs is used" if here == 1 else f"{here} of {gpus} GPUs are used"
    if accelerator.num_processes == 1 and strategy.startswith(("FSDP", "DeepSpeed")):
        used += ", and nothing is sharded"
    return f"{used}: {cure}" if hosts == 1 else f"{used} on each host: {cure}"


def report_start(accelerator, args, model, tokenizer, rows, lines, steps, facts, told):
    """Print what is really in force and one row, of a language model with its supervised part in [[ ]]; write it all to run.json.
    rows: with the columns length and largest if they are of tokens. lines: of row numbers, as the model sees them. facts: what is
    compared when the run goes on. told: {name: text}, what the recipe has to tell of its data and its loss, with its own form of the
    row as "sample", if it has one."""
    check_running_statistics(accelerator, model)
    check_head(accelerator, args, model)
    total, trained = np.sum(
        [(size := size_of(weight), size * weight.requires_grad) for weight in model.parameters()],
        axis=0,
    )
    known = getattr(rows, "column_names", rows)
    lengths, packing = (
        rows["length"][:] if "length" in known else np.zeros(1),
        "packing" in args and args.packing,
    )
    tokens, longest = lengths.sum() / len(lines), int(lengths.max())
    if longest:
        longest = (
            int(rows["longest"][:].max()) if "longest" in known else longest
        )  # of several texts in a row
        check_model(args, model, max(tokenizer.pad_token_id, rows["largest"][:].max()), longest)
    unit = "blocks" if "max_train_tokens" in args else "lines" if packing else "rows"
    batch, quantization = (
        facts["rows_per_step"],
        "int8" if args.load_in_8bit else args.bnb_4bit_quant_type if args.load_in_4bit else "no",
    )
    (name, fsdp, _), shares = (
        strategy_in_force(accelerator),
        accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"),
    )
    liger = "use_liger_kernel" in args and args.use_liger_kernel
    kernels = [
        text
        for on, text in (
            (args.torch_compile, "torch.compile of each kind of layer"),
            (liger, "Liger"),
            (args.tf32, "TF32"),
        )
        if on
    ]
    warning = unused_gpus(accelerator, name)
    summary = {"WARNING": warning} if warning else {}
    summary |= {
        "model": f"{args.model_name_or_path}, {total:,} parameters, {trained:,} trained ({trained / total:.2%})",
        "strategy": f"{name}, {accelerator.num_processes} x {accelerator.device.type}",
        "precision": f"weights {args.dtype}, mixed precision {accelerator.mixed_precision}, quantization {quantization}",
        "kernels": ", ".join([f"attention {model.config._attn_implementation}", *kernels]),
        "batch": f"{batch} {unit}{f', about {tokens * batch:,.0f} tokens' * (longest > 0)}; {steps} steps",
        "checkpoints": f"every {args.save_steps} steps"
        if args.save_steps
        else "when the run is stopped",
        **told,
    }
    summary["sample"] = summary.pop("sample", None) or marked(rows[0], tokenizer)
    if packing:
        summary["packing"] = (
            f"{len(rows)} rows in {len(lines)} lines of {args.max_length} tokens, {tokens / args.max_length:.1%} full"
        )
    if args.gradient_accumulation_steps > 1 and accelerator.num_processes > 1:
        summary["gradients"] = (
            "reduced in each micro-batch, so that no rank holds them whole"
            if shares or fsdp == 0 and name.endswith(("2", "3"))
            else "reduced once a step"
        )
    if slow := find_slow_paths(accelerator, args, model):
        summary["warning"] = "; ".join(slow)
    if accelerator.is_main_process:
        print("\n".join(f"{name:>11}: {text}" for name, text in summary.items()), flush=True)
        launch = {
            key: value
            for key, value in os.environ.items()
            if key.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_"))
            and not any(word in key for word in ("TOKEN", "KEY", "SECRET", "PASS"))
        }
        versions = {
            name: sys.modules[name].__version__
            for name in "torch accelerate transformers datasets peft bitsandbytes deepspeed".split()
            if name in sys.modules
        }
        run = {
            "summary": summary,
            "arguments": vars(args),
            **facts,
            "launch": launch,
            "versions": versions,
        }
        if not args.dry_run:
            Path(args.output_dir, "run.json").write_text(json.dumps(run, indent=2))
    if args.dry_run:
        end_dry_run(accelerator, args, total, trained, longest)


def end_dry_run(accelerator, args, total, trained, longest):
    """Say whether the disk has room, and how to plan the memory; then end all ranks, with 73 if it has none.
    total, trained: elements of the weights. longest: tokens of the longest row. A checkpoint takes 12 bytes a trained element; while
    one is written, all older ones are kept."""
    result = 4 * trained if args.use_peft else getattr(torch, args.dtype).itemsize * total
    need, free = (
        12 * trained * (args.save_total_limit + 1) + result,
        shutil.disk_usage(nearest_folder(args.output_dir)).free,
    )
    accelerator.print(
        f"       disk: checkpoints and result take up to {need / 2**30:.3g} GiB, {free / 2**30:,.0f} GiB are free in {args.output_dir}",
        flush=True,
    )
    if need > free:
        leave(
            accelerator,
            73,
            f"{need:,} bytes are needed for checkpoints and result, {free:,} are free in {args.output_dir}: lower --save_total_limit, or choose another --output_dir",
        )
    if "packing" in args:  # the planner knows language models
        accelerator.print(
            f"       plan: {plan_command(accelerator, args.max_length if args.packing else longest)}"
        )
    accelerator.print(
        "Dry run: all of this fits together; nothing was trained or written.", flush=True
    )
    conclude(accelerator, "done", 0)
    accelerator.end_training()
    sys.exit(0)


def plan_command(accelerator, longest):
    """The launch command with another first word: scripts/plan_memory.py tells what it takes of each GPU's memory."""
    words = {"--config_file": "YAML", "--num_processes": accelerator.num_processes}
    with contextlib.suppress(ValueError):  # check_launch has said that the call cannot be read
        launch = find_launch()
        if launch and launch.config_file:
            words["--config_file"] = launch.config_file
        for name in ("num_machines", "mixed_precision"):
            if launch and name in launch.given:
                words[f"--{name}"] = launch.given[name]
    options = [str(word) for option in words.items() for word in option]
    recipe = [sys.argv[0], *(word for word in sys.argv[1:] if word != "--dry_run")]
    return shlex.join(
        ["python", "scripts/plan_memory.py", *options, "--longest", str(longest), *recipe]
    )
