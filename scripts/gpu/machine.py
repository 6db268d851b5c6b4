"""Facts about the machine: device, driver, versions, commit, users of the GPU. Loads no torch."""

import importlib.metadata
import importlib.util
import os
import platform
import re
import runpy
import subprocess
from pathlib import Path

from .cell import ROOT

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


def version_of(package):
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions():
    """Versions of Python, of the packages that matter (None: not installed), and torch's CUDA."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        found[package] = version_of(package)
    found["cuda"] = torch_cuda()
    return found


def torch_cuda():
    """The CUDA version that torch was built for, or None; read from its version file, without
    loading torch.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None:
        return None
    return runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")


def nvidia_smi(*options):
    """Lines that nvidia-smi prints, each as a list of fields; [] if there is no nvidia-smi or no
    GPU.
    """
    command = ["nvidia-smi", *options, "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return [
        [field.strip() for field in line.split(",")]
        for line in done.stdout.splitlines()
        if line.strip()
    ]


def gpu_facts():
    """Name, driver, compute capability and MiB of the first GPU; {} without one."""
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


def cpu_facts():
    """The processor's name and its number of cores, in the place of a GPU's facts."""
    names = re.findall(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    name = names[0] if names else platform.machine()
    return {"device": f"{name}, {os.cpu_count()} cores", "driver": None, "compute_capability": None}


def facts(device):
    """What each record says about the machine."""
    of_device = gpu_facts() if device == "cuda" else cpu_facts()
    return {**of_device, "versions": versions(), "commit": commit()}


def commit():
    """The commit that is checked out, with "-dirty" if files differ from it; None outside of a
    repository.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def gpu_memory_used():
    """MiB in use on the first GPU, by whatever process; None without one."""
    lines = nvidia_smi("--query-gpu=memory.used")
    return float(lines[0][0]) if lines else None


def gpu_processes():
    """Ids of the processes that compute on the GPU, as far as the driver tells."""
    lines = nvidia_smi("--query-compute-apps=pid")
    return [int(line[0]) for line in lines if line[0].isdigit()]
