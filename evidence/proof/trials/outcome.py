# SPDX-License-Identifier: Apache-2.0
"""What runs have left, and how it differs from an uninterrupted run."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from components.checkpoint import checkpoints_in, find_damage, state_files_of
from proof.compare import read_steps, read_weights
from proof.faults import Fault
from proof.jobs import Run
from proof.trials.lab import Lab
from proof.trials.trial import Result, failed

MEASURED = ("_per_second", "_seconds", "_memory_gib")  # suffixes of numbers that vary between runs
# Starts of lines of launchers and of the rehearsal
LAUNCHERS_LINE = re.compile(
    r"[WEI]\d{4} |Traceback|  |torch\.distributed|[=-]{5}|\S+ FAILED|Root|Fail|\[\d\]|<NO_"
)


# ---- What a run has left ----


def metrics_of(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl, without speed, time and memory."""
    lines = []
    for text in (folder / "metrics.jsonl").read_text().splitlines():
        numbers = json.loads(text).items()
        lines.append({name: value for name, value in numbers if not name.endswith(MEASURED)})
    return lines


def last_step(folder: Path) -> int:
    """Return the last step in metrics.jsonl or 0; the last line may be incomplete."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return 0
    steps = re.findall(r'^{"step": (\d+),.*}$', path.read_text(), re.MULTILINE)
    return max((int(step) for step in steps), default=0)


def verified(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that can be trusted."""
    checkpoints = checkpoints_in(folder)
    return [step for step, path in checkpoints.items() if find_damage(path) is None]


def status_of(folder: Path) -> dict:
    """Return the content of a run's status.json."""
    return json.loads((folder / "status.json").read_text())


def hash_of_state(folder: Path, step: int) -> dict:
    """Return sizes and hashes of weights and optimizer state in the checkpoint of a step."""
    manifest = json.loads((folder / f"checkpoint-{step}" / "manifest.json").read_text())
    return {name: manifest[name] for name in state_files_of(manifest)}


def nonfinite_weights(folder: Path) -> list[str]:
    """Return the tensors in checkpoints and in the final model that are not finite."""
    found = []
    for path in folder.rglob("*.safetensors"):
        for name, array in load_file(path).items():
            if not np.isfinite(array).all():
                found.append(f"{path.name}: {name}")
    return found


def last_line(output: str) -> str:
    """Return the last line of the recipe itself, before those of the rehearsal and the launcher."""
    lines = output.split("shard report:")[0].splitlines()
    own = [line for line in lines if line.strip() and not LAUNCHERS_LINE.match(line)]
    return own[-1]


# ---- Compared with an uninterrupted run ----


def unequal(folder: Path, whole: Path) -> int:
    """Return how many lines of metrics.jsonl and final weights differ between two finished runs.

    Equal means bit for bit, except for speed and memory. If there is nothing to compare, that is a
    difference too.
    """
    lines = list(itertools.zip_longest(metrics_of(folder), metrics_of(whole)))
    differences = sum(ours != theirs for ours, theirs in lines)
    ours = read_weights(folder)
    theirs = read_weights(whole)
    names = ours.keys() | theirs.keys()
    for name in names:
        is_there = name in ours and name in theirs
        if not is_there or not np.array_equal(ours[name], theirs[name]):
            differences += 1
    if not lines:
        differences += 1
    if not names:
        differences += 1
    return differences


def difference_in_loss(folder: Path, whole: Path) -> float:
    """Return the largest relative difference in the loss of a step."""
    differences = []
    for ours, theirs in zip(read_steps(folder), read_steps(whole), strict=True):
        differences.append(abs(ours["loss"] - theirs["loss"]) / theirs["loss"])
    return max(differences)


def equal_to(folder: Path, whole: Path, wrong: str = "") -> Result:
    """Return the result of a trial whose run must end as an uninterrupted one.

    Args:
        wrong: what was not as promised before the end.
    """
    differences = unequal(folder, whole)
    return Result(differences == 0 and not wrong, differences, wrong)


def resume_and_compare(
    lab: Lab,
    folder: Path,
    job: Run,
    wrong: str = "",
    faults: tuple[Fault, ...] = (),
    flags: tuple = (),
    whole: Path | None = None,
) -> Result:
    """Resume a run with the same command: it must end as an uninterrupted one.

    Args:
        wrong: what was not as promised before.
        whole: the run to compare with, if it is not that of the lab.
    """
    last = lab.run_until_done(job, folder, faults, flags)[-1]
    if last.code != 0:
        return failed(f"{wrong} the next run ended with {last.code}: {last.tail}")
    return equal_to(folder, whole or lab.uninterrupted(job), wrong)
