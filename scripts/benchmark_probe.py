"""Run a script as it is, and write down when each of its optimizer steps ended and how much memory it took.

    python scripts/benchmark_probe.py timing.json recipes/llama.py --max_steps 25
    python scripts/benchmark_probe.py timing.json --warmup 5 --steps 25 recipes/llama.py --max_steps 25

The same few lines watch every contestant of scripts/benchmark.py: a hook that torch calls after `step` of whatever
optimizer there is. The script's own exit code is passed on. The file is one object:

    started     seconds from the start of this process to the moment from which `ends` counts
    ends        seconds from there to the end of each optimizer step
    memory      peaks in bytes: of resident memory, and on a GPU what tensors took (allocated), what of it could not be
                given back (active), and what the allocator held (reserved), since the end of the warm-up; and what
                all processes together had of the GPU when it was read (device)

A GPU works on while Python goes on, so there the first step and both ends of what is timed wait for it.
"""

import argparse
import json
import os
import runpy
import sys
import time
from pathlib import Path

from usage import Parser

PEAKS = {
    "allocated": "allocated_bytes.all.peak",
    "active": "active_bytes.all.peak",
    "reserved": "reserved_bytes.all.peak",
}


def seconds_alive():
    """Seconds since the kernel started this process, to a hundredth."""
    fields = (
        Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()
    )  # the name before it may hold spaces
    ticks = int(fields[19])  # field 22 of proc(5), after boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def peak_resident():
    """Most bytes of memory that this process had at once. Not getrusage, which counts the parent's before exec too."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def peak_memory():
    """Peaks in bytes by name, those of the GPU among them if it is in use."""
    import torch

    peaks = {"resident": peak_resident()}
    if torch.cuda.is_initialized():
        counted = torch.cuda.memory_stats()
        peaks |= {name: counted[key] for name, key in PEAKS.items()}
        free, total = torch.cuda.mem_get_info()
        peaks["device"] = total - free
    return peaks


def watch(record, start, warmup, steps):
    """Let torch fill `record` while a script trains; `start` is what `ends` counts from, in time.perf_counter's."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    def after_step(*_):
        number = len(record["ends"]) + 1
        if torch.cuda.is_initialized() and number in (1, warmup, steps):
            torch.cuda.synchronize()
        record["ends"].append(time.perf_counter() - start)
        if torch.cuda.is_initialized() and number == warmup:
            torch.cuda.reset_peak_memory_stats()
        if number == steps:
            record["memory"] = peak_memory()

    register_optimizer_step_post_hook(after_step)


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", type=Path, metavar="OUT.json", help="file to write; rank N writes OUT.N.json"
    )
    parser.add_argument("--warmup", type=int, default=0, help="steps before those that are timed")
    parser.add_argument(
        "--steps", type=int, default=0, help="step at which memory is read (default: at the end)"
    )
    parser.add_argument("script", metavar="SCRIPT", help="what to run")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="ARGS")
    return parser, parser.parse_args()


def main():
    start, started = time.perf_counter(), seconds_alive()
    (parser, args), rank = parse_args(), int(os.environ.get("RANK", 0))
    if not Path(args.script).is_file():
        parser.error(f"{args.script} does not exist")
    record = {"started": started, "ends": [], "memory": {}}
    watch(record, start, args.warmup, args.steps)
    sys.argv = [args.script, *args.script_args]
    sys.path[0] = str(Path(args.script).resolve().parent)  # as `python SCRIPT` would have it
    try:
        runpy.run_path(args.script, run_name="__main__")
    finally:
        record["memory"] = record["memory"] or peak_memory()
        out = args.out.with_suffix(f".{rank}.json") if rank else args.out
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record))


if __name__ == "__main__":
    main()
