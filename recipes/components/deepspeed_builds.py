# SPDX-License-Identifier: Apache-2.0
"""Find locks that killed builds of DeepSpeed's ops have left behind."""

import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
from accelerate import Accelerator

from components.plugins import deepspeed_config
from core.exits import RANK

MINUTES_OF_A_BUILD = 5  # Building one of DeepSpeed's ops takes one or two.
COMPILERS = (
    "ninja",
    "c++",
    "g++",
    "gcc",
    "clang",
    "clang++",
    "cc1plus",
    "nvcc",
    "cicc",
    "ptxas",
    "hipcc",
    "icpx",
)


def find_locked_builds(accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem for each lock that a killed build of a DeepSpeed op has left behind.

    torch would wait forever for such a lock (torch.utils.file_baton). A recent lock may be that of
    a running build, and only gets a warning.
    """
    if accelerator.device.type == "cpu":
        return
    for op in ops_to_build(deepspeed_config(accelerator)):
        lock = Path(build_folder(op), "lock")
        try:
            minutes = (time.time() - lock.stat().st_mtime) / 60
        except OSError:  # There is no lock.
            continue
        if minutes < MINUTES_OF_A_BUILD:
            warn_of_lock(op, lock)
        elif not is_compiling():
            yield (
                f"a build of DeepSpeed's {op} was killed {minutes:,.0f} minutes ago and left "
                f"{lock}, for which this run would wait forever: delete that file"
            )


def ops_to_build(config: Mapping[str, Any]) -> list[str]:
    """Return the ops that DeepSpeed builds at first use, in order to offload from a GPU."""
    zero = config.get("zero_optimization", {})
    optimizer = (zero.get("offload_optimizer") or {}).get("device")
    parameters = (zero.get("offload_param") or {}).get("device")
    ops = []
    if optimizer in ("cpu", "nvme"):
        ops.append("cpu_adam")
    if "nvme" in (optimizer, parameters):
        ops += ["async_io", "pin_memory"]
    return ops


def build_folder(op: str) -> str:
    """Return the folder in which torch builds an extension of this name."""
    from torch.utils.cpp_extension import _get_build_directory  # It loads setuptools.

    return _get_build_directory(op, verbose=False)


def warn_of_lock(op: str, lock: Path) -> None:
    """Print on rank 0 that DeepSpeed may be waiting for a lock."""
    if RANK == 0:
        print(
            f"warning: DeepSpeed waits until {lock} is gone; if no other run is building {op}, "
            "delete that file",
            file=sys.stderr,
            flush=True,
        )


def is_compiling() -> bool:
    """Return whether a compiler runs on this host."""
    return any(process.info["name"] in COMPILERS for process in psutil.process_iter(["name"]))
