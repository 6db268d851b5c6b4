# SPDX-License-Identifier: Apache-2.0
"""Measure a cell: every contestant in turn, several times, with what is needed to repeat it."""

import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import machine
from .cells import Cell, Result, Run, Settings
from .commands import PRECISION, command_of
from .gates import judge
from .held_out import held_out_batches, held_out_loss
from .models import shape_of
from .prepare import prepare
from .recipe import Batch
from .runs import delete_weights, run_once
from .tables import line_of

LIBRARIES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl", "bitsandbytes")
ATTEMPTS = 3  # at most, if the machine was busy with something else during a run


def run_cell(cell: Cell, settings: Settings, repeats: int) -> Result:
    """Run every contestant of a cell `repeats` times in turn; return one object of the results."""
    cell, left_out = without_missing(cell)
    for label, reason in left_out.items():
        print(f"LEFT OUT  {cell.name}: {label}: {reason}", flush=True)
    data = {}
    for label, contestant in cell.contestants.items():
        data[label] = prepare(cell, contestant, settings)
    held_out = held_out_batches(cell, settings) if cell.kind == "shipped" else []
    if cell.cache == "warm":
        for label in cell.contestants:
            run_once(cell, label, data[label], settings)
    runs = []
    for repeat in range(repeats):
        for label in cell.contestants:
            run = {"repeat": repeat, **run_undisturbed(cell, label, data[label], settings)}
            finish_run(cell, run, held_out, settings)
            runs.append(run)
            print(line_of(cell.name, run), flush=True)
    result = describe(cell, settings)
    if left_out:
        result["left out"] = left_out
    dtype = "bfloat16" if PRECISION[cell.device] == "bf16" else cell.flags.get("dtype", "float32")
    return result | {"runs": judge(runs, cell.kind, dtype)}


def run_undisturbed(cell: Cell, label: str, data: Path, settings: Settings) -> Run:
    """Run a contestant until a run was not disturbed, at most ATTEMPTS times."""
    run = run_once(cell, label, data, settings)
    for _ in range(1, ATTEMPTS):
        if not run["loaded"]:
            break
        run = run_once(cell, label, data, settings)
    return run


def finish_run(cell: Cell, run: Run, held_out: list[Batch], settings: Settings) -> None:
    """Add the loss on held-out rows, if there are any, to a run, and delete large weights."""
    folder = settings.run_folder(cell, run["contestant"])
    if held_out and "failed" not in run:
        run["held_out_loss"] = round(held_out_loss(folder / "run", held_out), 5)
    if cell.device == "cuda":
        delete_weights(folder)


def without_missing(cell: Cell) -> tuple[Cell, dict[str, str]]:
    """Return the cell without contestants whose package is missing, and {label: reason}."""
    contestants = {}
    left_out = {}
    for label, contestant in cell.contestants.items():
        package = contestant.needs
        if package and machine.version_of(package) is None:
            left_out[label] = f"not installed: {package}"
        else:
            contestants[label] = contestant
    return replace(cell, contestants=contestants), left_out


def describe(cell: Cell, settings: Settings) -> Result:
    """Return what is needed to measure a cell again."""
    description: Result = {
        "cell": cell.name,
        "kind": cell.kind,
        "device": device_name(cell.device),
        "date": time.strftime("%Y-%m-%d"),
        "commit": machine.commit() or "",
        "versions": installed_libraries(),
        "mixed precision": PRECISION[cell.device],
        "warmup": settings.warmup_of(cell),
        "rows": cell.rows,
    }
    description["models"] = {name: shape_of(name, settings.smoke) for name in cell.models()}
    flags = {}
    for label, contestant in cell.contestants.items():
        flags[label] = cell.flags_of(contestant)
    description["flags"] = flags
    description["commands"] = printable_commands(cell, settings)
    return description


def installed_libraries(names: Sequence[str] = LIBRARIES) -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    versions = {}
    for name in names:
        version = machine.version_of(name)
        if version is not None:
            versions[name] = version
    return versions


def printable_commands(cell: Cell, settings: Settings) -> dict[str, str]:
    """Return each contestant's command line as text without the paths of this machine."""
    output_dir = settings.output_dir
    data = output_dir / "data" / "ROWS"
    folder = output_dir / "cells" / "RUN"
    commands = {}
    for label, contestant in cell.contestants.items():
        text = shlex.join(command_of(cell, contestant, data, folder, settings))
        text = text.replace(sys.executable, "python")
        commands[label] = text.replace(str(output_dir), "RUNS")
    return commands


def device_name(device: str) -> str:
    """Return the name of the GPU, or that of the processor with the threads per process."""
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    return f"{machine.processor_and_cores()}, one thread a process"
