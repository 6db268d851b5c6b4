# SPDX-License-Identifier: Apache-2.0
"""One run of one contestant: started, watched, and read."""

import json
import re
import shutil
import subprocess
from pathlib import Path

from paths import ROOT

from . import idle
from .cells import Cell, Run, Settings
from .commands import command_of, environment

IN_A_SMOKE_TEST = idle.Use(load=0.0, disturbs=False)  # It has no figures that could be disturbed.


def run_once(cell: Cell, label: str, data: Path, settings: Settings) -> Run:
    """Launch one contestant; return the load, and what `measured` returns or {"failed": why}."""
    contestant = cell.contestants[label]
    folder = settings.run_folder(cell, label)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = command_of(cell, contestant, data, folder, settings)
    before = IN_A_SMOKE_TEST if settings.smoke else idle.use_before(cell.device)
    with open(folder / "output.txt", "w") as output:
        code = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(cell, contestant, folder, settings),
            stdout=output,
            stderr=subprocess.STDOUT,
        ).returncode
    after = IN_A_SMOKE_TEST if settings.smoke else idle.use_after(cell.device, contestant.ranks)
    run = {
        "contestant": label,
        "load": [round(before.load, 2), round(after.load, 2)],
        "loaded": before.disturbs or after.disturbs,
    }
    failure = failure_of(folder, code, contestant.ranks, settings)
    if failure:
        return run | {"failed": failure}
    return run | measured(folder, settings.warmup_of(cell))


def failure_of(folder: Path, code: int, ranks: int, settings: Settings) -> str:
    """Return why a run that has ended did not train, "" if it did."""
    if code:
        text = (folder / "output.txt").read_text()
        lines = text.replace(str(settings.output_dir.resolve()), "RUNS").splitlines()
        return f"exit code {code}: {error_of(lines)[:300]}"
    # `accelerate launch --cpu --num_processes 2` silently starts only one process.
    for rank in range(1, ranks):
        if not (folder / f"probe.{rank}.json").exists():
            return f"rank {rank} of {ranks} did not run"
    return ""


def error_of(lines: list[str]) -> str:
    """Return the line of a program's output that says what went wrong, "" without output."""
    errors = [line for line in lines if re.match(r"(error: |\w*Error: )", line)]
    candidates = errors or lines or [""]
    return candidates[-1]


def measured(folder: Path, warmup: int) -> Run:
    """Return the measurements of one run, from the probe and metrics.jsonl.

    They are seconds, tokens per second, peaks in MiB, and the loss of each step, in nats.
    """
    probe = json.loads((folder / "probe.json").read_text())
    metrics = (folder / "run" / "metrics.jsonl").read_text()
    steps = [json.loads(line) for line in metrics.splitlines()]
    ends = probe["ends"]  # when each step ended, in seconds
    seen = [line["num_input_tokens_seen"] for line in steps]
    if len(ends) != len(seen):
        return {"failed": f"{len(ends)} optimizer steps, but {len(seen)} lines in metrics.jsonl"}
    peaks = {name: round(size / 2**20, 1) for name, size in probe["memory"].items()}
    run = {
        "seconds_to_first_step": round(probe["started"] + ends[0], 3),
        "memory_mib": peaks,
        "losses": [line["loss"] for line in steps],
        "steps": len(steps),
        "tokens": seen[-1],
    }
    if warmup and len(ends) > warmup:
        seconds = ends[-1] - ends[warmup - 1]
        tokens = seen[-1] - seen[warmup - 1]
        run["seconds_per_step"] = round(seconds / (len(ends) - warmup), 6)
        run["tokens_per_second"] = round(tokens / seconds, 2)
    return run


def delete_weights(folder: Path) -> None:
    """Delete the weights of a run, gigabytes for a large model; its measurements stay."""
    for path in folder.rglob("*.safetensors"):
        path.unlink()
