# SPDX-License-Identifier: Apache-2.0
"""Where the seconds of a save go."""

import pstats
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.commands import as_words

from . import launches
from .cell import Outcome, Row, Setup
from .probed import model_and_rows

# Files of recipes/components/ that save
PARTS = ("run.py", "checkpoint.py", "state.py", "deepspeed_state.py")
SHOWN = 20  # functions
LEAST_SECONDS = 0.005

Function = tuple[str, int, str]  # file, line, name


def by_part(setup: Setup) -> Outcome:
    """Profile a save of full training state; return a row for each function that takes time.

    Raises RuntimeError if the run fails.
    """
    sizes = {"per_device_train_batch_size": 1, "max_length": 1024}
    folder = setup.work / "run"
    run = {"output_dir": folder, "max_steps": 3, "save_steps": 3, "eval_strategy": "no"}
    flags = model_and_rows(setup, "1B", sizes).flags | run
    profile = setup.work / "profile.bin"
    command = [sys.executable, "-m", "cProfile", "-o", profile]
    command += ["recipes/llama.py", *as_words(flags)]
    command = [str(word) for word in command]
    timeout = max(setup.seconds_left(), 1)
    done = launches.finish(command, launches.environment_of(setup), timeout)
    if done.failure:
        raise RuntimeError(done.failure)
    rows = [row for row in profile_rows(profile) if row["seconds"] >= LEAST_SECONDS]
    return Outcome([size_row(folder), *rows], None, [launches.printable(command, setup)])


def size_row(folder: Path) -> Row:
    """Return the number of a run's checkpoints, and the size of the newest."""
    checkpoints = sorted(folder.glob("checkpoint-*"))
    files = [path for path in checkpoints[-1].rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return {
        "function": "checkpoint, GiB",
        "calls": len(checkpoints),
        "seconds": None,
        "size": round(size / 2**30, 3),
    }


def profile_rows(path: Path) -> list[Row]:
    """Return the functions that took the most seconds of a save, with those inside them.

    They are the functions of the files of PARTS, and what these call directly. Of a function that
    is also called from elsewhere, only the calls from these files count.
    """
    found = []
    # pyrefly: ignore[missing-attribute]  # typeshed leaves out this attribute
    for (file, _, function), facts in pstats.Stats(str(path)).stats.items():
        _, calls, _, seconds, callers = facts
        name = f"{Path(file).name}: {function}"
        if not is_part(file):
            name = f"called there: {function}"
            calls, seconds = calls_from_parts(callers)
        if calls:
            found.append({"function": name, "calls": calls, "seconds": round(seconds, 3)})
    found.sort(key=lambda row: row["seconds"], reverse=True)
    return found[:SHOWN]


def is_part(file: str) -> bool:
    """Return whether a file is one of PARTS; other libraries have files of these names."""
    path = Path(file)
    return path.name in PARTS and path.parent.name == "components"


def calls_from_parts(callers: Mapping[Function, tuple[Any, ...]]) -> tuple[int, float]:
    """Return the calls of a function from the files of PARTS, and their seconds.

    callers: {calling function: (calls, calls that are not recursive, own seconds, seconds with
    what is called)}, as in cProfile.
    """
    calls = 0
    seconds = 0.0
    for (file, _, _), facts in callers.items():
        if is_part(file):
            calls += facts[0]
            seconds += facts[3]
    return calls, seconds
