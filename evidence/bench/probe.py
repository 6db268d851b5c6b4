# SPDX-License-Identifier: Apache-2.0
"""Record when each optimizer step of a script ended, and its memory, without changing the script.

The same few lines watch every contestant: a hook that torch calls after `step` of any optimizer.
On a GPU, Python runs ahead of the kernels. The hook therefore waits for the GPU after the first
step, and at both ends of the timed steps.
"""

import json
import os
import runpy
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from paths import RECIPES

PEAKS = {
    "allocated": "allocated_bytes.all.peak",
    "active": "active_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
}


@dataclass
class Record:
    """What the probe writes; evidence/benchmark_probe.py explains the fields."""

    started: float  # seconds
    ends: list[float] = field(default_factory=list)  # seconds
    memory: dict[str, int] = field(default_factory=dict)  # bytes


@dataclass(frozen=True)
class Watched:
    """Which steps are timed."""

    begun: float  # time.perf_counter() from which the ends of steps are counted
    warmup: int  # steps before the timed ones
    steps: int  # step after which memory is read; 0: at the end


def seconds_alive() -> float:
    """Return the seconds since the kernel started this process, to a hundredth."""
    text = Path("/proc/self/stat").read_text()
    fields = text.rsplit(")", 1)[1].split()  # The process name before them may contain spaces.
    ticks = int(fields[19])  # field 22 of proc(5), ticks after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_resident() -> int:
    """Return the most bytes of memory that this process had at once.

    getrusage would also count what the parent had before exec.
    """
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def peak_memory() -> dict[str, int]:
    """Return peaks in bytes by name, with those of the GPU if it is in use."""
    import torch

    peaks = {"resident": peak_resident()}
    if torch.cuda.is_initialized():
        counted = torch.cuda.memory_stats()
        for name, key in PEAKS.items():
            peaks[name] = counted[key]
        free, total = torch.cuda.mem_get_info()
        peaks["device"] = total - free
    return peaks


def watch(record: Record, watched: Watched) -> None:
    """Make torch fill `record` while a script trains."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(*_: object) -> None:
        number = len(record.ends) + 1
        if torch.cuda.is_initialized() and number in (1, watched.warmup, watched.steps):
            torch.cuda.synchronize()
        record.ends.append(time.perf_counter() - watched.begun)
        if torch.cuda.is_initialized() and number == watched.warmup:
            torch.cuda.reset_peak_memory_stats()
        if number == watched.steps:
            record.memory = peak_memory()

    register_optimizer_step_post_hook(after_step)


def stand_in_for_python(script: str, arguments: list[str]) -> None:
    """Set sys.argv and sys.path to what `python SCRIPT ARGUMENTS` would start with.

    The unmodified script runs in this process, since torch's hook does not reach other processes.
    Python would put the script's own folder first on the path, where this process has that of the
    probe. `paths` has also added recipes/, which a script elsewhere would not see.
    """
    sys.argv = [script, *arguments]
    if str(RECIPES) in sys.path:
        sys.path.remove(str(RECIPES))
    sys.path[0] = str(Path(script).resolve().parent)


def run_watched(script: str, arguments: list[str], record: Record, watched: Watched) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would, and fill `record` however it ends.

    Raises what the script raises, SystemExit included.
    """
    watch(record, watched)
    stand_in_for_python(script, arguments)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        if not record.memory:
            record.memory = peak_memory()


def write_record(record: Record, path: Path, rank: int) -> None:
    """Write a record to OUT.json for rank 0, and to OUT.N.json for any other rank N."""
    if rank:
        path = path.with_suffix(f".{rank}.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record)))
