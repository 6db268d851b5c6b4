# SPDX-License-Identifier: Apache-2.0
"""Facts about the machine: device, driver, versions, commit, users of the GPU. Loads no torch."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
from pathlib import Path
from typing import Any

from paths import ROOT

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "peft",
    "bitsandbytes",
    "deepspeed",
    "datasets",
    "trl",
    "liger-kernel",
    "flash-attn",
    "kernels",
    "triton",
)


def version_of(package: str) -> str | None:
    """Return the installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> dict[str, str | None]:
    """Return versions of Python, of PACKAGES (None: not installed), and of torch's CUDA."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        found[package] = version_of(package)
    found["cuda"] = torch_cuda()
    return found


def torch_cuda() -> str | None:
    """Return the CUDA version that torch was built for, or None.

    It is read from torch's version file, without loading torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = Path(spec.origin).with_name("version.py")
    return runpy.run_path(str(version_file)).get("cuda")


def nvidia_smi(*options: str) -> list[list[str]]:
    """Return the lines that nvidia-smi prints, each as a list of fields.

    Returns [] if there is no nvidia-smi or no GPU.
    """
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    return [[field.strip() for field in line.split(",")] for line in lines]


def gpu_facts() -> dict[str, Any]:
    """Return name, driver, compute capability and MiB of the first GPU; {} without one."""
    lines = nvidia_smi("--query-gpu=name,driver_version,compute_cap,memory.total")
    if not lines:
        return {}
    name, driver, capability, memory = lines[0]
    return {
        "device": name,
        "driver": driver,
        "compute_capability": capability,
        "memory_mib": float(memory),
    }


def processor_and_cores() -> str:
    """Return the processor's name and its number of cores."""
    text = Path("/proc/cpuinfo").read_text()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found[1] if found else platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def cpu_facts() -> dict[str, Any]:
    """Return the facts of a CPU, under the keys of a GPU's."""
    return {"device": processor_and_cores(), "driver": None, "compute_capability": None}


def facts(device: str) -> dict[str, Any]:
    """Return the facts about the machine that each record has."""
    of_device = gpu_facts() if device == "cuda" else cpu_facts()
    return {**of_device, "versions": versions(), "commit": commit()}


def commit() -> str | None:
    """Return the commit that is checked out, with "-dirty" if files differ from it.

    Returns None outside a repository.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def gpu_memory_used() -> float | None:
    """Return the MiB in use on the first GPU, by whatever process; None without one."""
    lines = nvidia_smi("--query-gpu=memory.used")
    return float(lines[0][0]) if lines else None


def gpu_processes() -> list[int]:
    """Return the ids of the processes that compute on the GPU, as far as the driver lists them."""
    lines = nvidia_smi("--query-compute-apps=pid")
    return [int(line[0]) for line in lines if line[0].isdigit()]
