# SPDX-License-Identifier: Apache-2.0
"""Processes of a trial: find them, read their state, and kill all of them."""

import contextlib
import os
import signal
import time
from pathlib import Path

GONE = "ZX"  # states of a process that has ended


def processes_of(folder: Path) -> dict[int, int | None]:
    """Return {process id: its RANK or None} of all that run for a trial's folder.

    A zombie no longer has an environment, so that it is not among them.
    """
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            variables = (path / "environ").read_bytes().split(b"\0")
            if f"TRIAL={folder}".encode() in variables:
                found[int(path.name)] = rank_among(variables)
    return found


def rank_among(variables: list[bytes]) -> int | None:
    """Return the rank that an environment names."""
    for variable in variables:
        name, _, value = variable.partition(b"=")
        if name == b"RANK":
            return int(value)
    return None


def ranks_of(folder: Path) -> dict[int, int]:
    """Return {rank: process id} of the ranks that run for a trial's folder."""
    processes = processes_of(folder)
    return {rank: process for process, rank in processes.items() if rank is not None}


def kill_all(folder: Path) -> None:
    """Kill all processes of a trial at once (kill -9); return when all are gone."""
    found = processes_of(folder)
    while found:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)
        found = processes_of(folder)


def state_of(process: int) -> str:
    """Return the letter of /proc, such as T for stopped; Z also if there is no such process."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{process}/stat").read_text()
        return text.rpartition(")")[2].split()[0]
    return "Z"


def is_gone(process: int) -> bool:
    """Return whether a process has ended."""
    return state_of(process) in GONE
