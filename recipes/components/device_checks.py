# SPDX-License-Identifier: Apache-2.0
"""Find what this machine cannot run, for lack of a GPU, of its capability, or of a package."""

import difflib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

import torch
from accelerate import Accelerator
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from components import varlen
from components.strategy import compute_dtype
from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    LigerArguments,
    LossInHeadArguments,
)

Capability = tuple[int, int]  # (major, minor) of an NVIDIA GPU; (0, 0) of any other device
AMPERE = (8, 0)
ADA = (8, 9)
HOPPER = (9, 0)


@dataclass(frozen=True)
class Kernel:
    """The package and the GPU that an attention kernel needs."""

    package: str
    capability: Capability


FLASH_ATTENTION = {
    "flash_attention_2": Kernel("flash-attn", AMPERE),
    "flash_attention_3": Kernel("flash-attn-3", HOPPER),
    "flash_attention_4": Kernel("flash-attn-4", HOPPER),
}


def find_device_problems(args: CommonArguments, accelerator: Accelerator) -> Iterator[str]:
    """Yield a line with the fix for each argument that this device cannot run."""
    capability = capability_of(accelerator)
    if args.attn_implementation == varlen.NAME:
        yield from find_varlen_problems(args, accelerator, capability)
    else:
        yield from find_attention_problems(args, accelerator, capability)
    on_cpu = accelerator.device.type == "cpu"
    if on_cpu and args.optim.startswith("paged"):
        yield (
            f"--optim {args.optim} pages between GPU and host: use adamw_8bit or adamw_torch_fused"
        )
    yield from find_liger_problems(args, on_cpu)
    if args.tf32:
        yield from find_tf32_problems(capability)
    if accelerator.device.type == "cuda":
        yield from find_precision_problems(args, accelerator, capability)
    # On a CPU accelerate scales no loss. DeepSpeed does.
    if on_cpu and accelerator.mixed_precision == "fp16" and not accelerator.state.deepspeed_plugin:
        yield "mixed_precision: fp16 needs a GPU: pass --mixed_precision no to accelerate launch"
    compiles = isinstance(args, DenseModelArguments) and args.torch_compile
    if compiles and on_cpu and not shutil.which("c++"):
        yield "--torch_compile compiles C++ on a CPU: put a compiler (g++) on the PATH"
    if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":
        yield from find_fp8_problems(args, accelerator, capability)


def capability_of(accelerator: Accelerator) -> Capability:
    """Return the compute capability of an NVIDIA GPU, (0, 0) of any other device."""
    if accelerator.device.type != "cuda":
        return (0, 0)
    return torch.cuda.get_device_capability(accelerator.device)


def is_installed(package: str) -> bool:
    """Return whether a package is installed.

    The name of a module would not be enough, since FlashAttention 2 and 4 share one.
    """
    try:
        return bool(metadata.version(package))
    except metadata.PackageNotFoundError:
        return False


# ---- Attention ----
def find_attention_problems(
    args: CommonArguments, accelerator: Accelerator, capability: Capability
) -> Iterator[str]:
    """Yield a line for each reason why this attention, which is not varlen, cannot run."""
    name = args.attn_implementation
    if name is None:
        return
    flag = f"--attn_implementation {name}"
    is_from_hub = "/" in name
    if not is_from_hub and name not in known_attentions():
        yield f"{flag}: no attention has this name: {suggest_attention(name)}"
    if accelerator.device.type == "cpu":
        if is_from_hub or name.startswith(("flash", "flex")):
            yield f"{flag} needs a GPU: use sdpa"
        return
    kernel = FLASH_ATTENTION.get(name)
    if is_from_hub:
        kernel = Kernel("kernels", (0, 0))
    if kernel is None:
        return
    if not is_installed(kernel.package):
        yield (
            f"{flag} needs the package {kernel.package}: pip install {kernel.package}, or use sdpa"
        )
    if capability < kernel.capability:
        yield f"{flag} {needs_capability(kernel.capability, capability)}: use sdpa"


def known_attentions() -> list[str]:
    """Return the names of all attentions, except for those of continuous batching."""
    names = {"eager", varlen.NAME, *FLASH_ATTENTION, *ALL_ATTENTION_FUNCTIONS.valid_keys()}
    return sorted(name for name in names if "|" not in name)


def suggest_attention(wrong: str) -> str:
    """Return a hint with the name that is closest to an unknown one, and with all names."""
    known = known_attentions()
    close = difflib.get_close_matches(wrong, known, 1)
    meaning = f"did you mean {close[0]}? " if close else ""
    return f"{meaning}Available: {', '.join(known)}"


def needs_capability(needed: Capability, available: Capability) -> str:
    """Return the end of a sentence that says that something needs a newer GPU."""
    return (
        f"needs a GPU of compute capability {needed[0]}.{needed[1]} or more, this one has "
        f"{available[0]}.{available[1]}"
    )


def find_varlen_problems(
    args: CommonArguments, accelerator: Accelerator, capability: Capability
) -> Iterator[str]:
    """Yield a line for each reason why --attn_implementation varlen cannot run."""
    flag = f"--attn_implementation {varlen.NAME}"
    if not isinstance(args, LossInHeadArguments):
        yield f"{flag} is for the recipes of causal language models: use sdpa"
    if accelerator.device.type != "cuda":
        yield f"{flag} needs an NVIDIA GPU: use sdpa"
        return
    if capability < AMPERE:
        yield f"{flag} {needs_capability(AMPERE, capability)}: use sdpa"
    if not varlen.is_available():
        yield f"{flag} needs torch 2.11 or newer, this is {torch.__version__}: use sdpa"
    if accelerator.mixed_precision == "no" and args.dtype == "float32":
        yield f"{flag} computes in bf16 or fp16: launch with --mixed_precision bf16, or use sdpa"


# ---- Kernels and precision ----
def find_liger_problems(args: CommonArguments, on_cpu: bool) -> Iterator[str]:
    """Yield a line if --use_liger_kernel cannot run."""
    if not isinstance(args, LigerArguments) or not args.use_liger_kernel:
        return
    if on_cpu:
        yield "--use_liger_kernel: its Triton kernels need a GPU"
    elif not is_installed("liger-kernel"):
        yield "--use_liger_kernel needs the package liger-kernel: pip install liger-kernel"


def find_tf32_problems(capability: Capability) -> Iterator[str]:
    """Yield a line if --tf32 cannot run."""
    if capability < AMPERE:
        yield "--tf32 needs an NVIDIA GPU of compute capability 8.0 (Ampere) or more"


def find_precision_problems(
    args: CommonArguments, accelerator: Accelerator, capability: Capability
) -> Iterator[str]:
    """Yield a line for each reason why GPU or attention cannot compute in the dtype."""
    computes_in = compute_dtype(args.dtype, accelerator)
    # accelerate relies on torch.cuda.is_bf16_supported(), which is true even if bf16 is emulated. A
    # base stored in bf16 is allowed under fp16, in which its matrix products then run. ROCm numbers
    # its GPUs differently.
    if computes_in == "bfloat16" and capability < AMPERE and not torch.version.hip:
        fix = "use --dtype float32, and pass --mixed_precision fp16 to accelerate launch"
        if accelerator.mixed_precision == "bf16":
            fix = "pass --mixed_precision fp16 to accelerate launch"
        yield (
            f"this GPU (compute capability {capability[0]}.{capability[1]}) has no bf16 hardware"
            f" and would emulate it slowly: {fix}"
        )
    if "flash" in (args.attn_implementation or "") and computes_in == "float32":
        yield (
            f"--attn_implementation {args.attn_implementation} computes in bf16 and fp16 only:"
            " pass --mixed_precision bf16 to accelerate launch, or use sdpa"
        )


def find_fp8_problems(
    args: CommonArguments, accelerator: Accelerator, capability: Capability
) -> Iterator[str]:
    """Yield a line for each reason why mixed_precision: fp8 cannot run."""
    if capability < ADA:
        yield (
            "mixed_precision: fp8 needs an NVIDIA GPU of compute capability 8.9 (Ada, Hopper) or "
            "more: set it to bf16"
        )
    if getattr(accelerator, "fp8_backend", None) == "TE":
        yield (
            "fp8_config: backend: TE replaces the output head, in which the loss is computed: use "
            "backend: AO (pip install torchao)"
        )
    if args.use_peft:
        yield (
            "mixed_precision: fp8 trains whole weights only: set it to bf16, or leave out "
            "--use_peft"
        )
