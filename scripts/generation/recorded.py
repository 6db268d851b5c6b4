# SPDX-License-Identifier: Apache-2.0
"""What a run has recorded beside its result: run.json, or what of it was pushed to the hub."""

import json
from pathlib import Path
from typing import Any, NoReturn

from exits import Exit, stop

RUN = "run.json"
PUBLIC_RUN = "run_public.json"  # What scripts/push.py publishes of it


def find_run(folder: Path) -> Path:
    """Return the file with the record of a run; that of run.json if there is none."""
    path = folder / RUN
    public = folder / PUBLIC_RUN
    if public.is_file() and not path.is_file():
        return public
    return path


def arguments_of_run(folder: Path) -> dict[str, Any]:
    """Return the arguments of the run that wrote a folder; {} without its record.

    Raises SystemExit with 65 after a line if the file cannot be read.
    """
    run = read_run(folder)
    if not run:
        return {}
    try:
        return dict(run["arguments"])
    except (ValueError, LookupError, TypeError):
        reject_run(folder)


def read_run(folder: Path) -> dict[str, Any]:
    """Return the record of the run that wrote a folder; {} without one.

    Raises SystemExit with 65 after a line if the file cannot be read.
    """
    path = find_run(folder)
    if not path.is_file():
        return {}
    try:
        run = json.loads(path.read_text())
    except (OSError, ValueError):
        reject_run(folder)
    if not isinstance(run, dict) or not run:
        reject_run(folder)
    return run


def reject_run(folder: Path) -> NoReturn:
    """End with 65 after a line about a record that is not one."""
    path = find_run(folder)
    stop(Exit.DATA, f"{path}: has no arguments of a run, from which prompts are built")
