# SPDX-License-Identifier: Apache-2.0
"""Run cells one after another, each in its own process, and write one JSON file for each.

All processes of a cell inherit a mark in their environment. At the end of a cell every process with
that mark is killed, even one in a session of its own, so that nothing holds memory of the GPU when
the next cell starts.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from paths import ROOT

from .cell import (
    FAILED,
    MEASURED,
    NOT_OK,
    OK,
    SKIPPED,
    TIMED_OUT,
    Cell,
    Setup,
    Skip,
    write_json,
)

MARK = "GPU_PROOF_CELL"
PROGRAM = ROOT / "evidence" / "gpu_proof.py"
LAST_LINES = 15
PATIENCE = {"cuda": 1, "cpu": 3}  # times a cell's limit: on a loaded CPU, imports take a minute
MEMORY_BACK = 20  # seconds to wait until the driver has freed the memory of dead processes
FREE_AGAIN_MIB = 256  # increase of the GPU's memory in use that is tolerated after a cell
# Suffixes of a finished cell's files that are kept; all others, mostly weights, are deleted
KEPT_SUFFIXES = (".json", ".jsonl", ".log", ".txt")
VERDICTS = {True: OK, False: NOT_OK, None: MEASURED}  # by whether the cell's bound holds

Record = dict[str, Any]  # the JSON of a cell


@dataclass(frozen=True)
class Proof:
    """What all cells of one call of the command share."""

    device: str  # "cuda" or "cpu"
    tiny: bool
    output: Path  # folder of all cells
    facts: dict[str, Any]  # about the machine; a part of each record
    most_seconds: int | None = None  # a limit for every cell, None for each cell's own
    shares_gpu: bool = False  # whether other programs use the GPU, so that its memory says nothing

    def limit_of(self, cell: Cell) -> int:
        """Return the seconds after which a cell is killed."""
        limit = cell.limit * PATIENCE[self.device]
        return limit if self.most_seconds is None else min(limit, self.most_seconds)

    def record_path(self, cell: Cell) -> Path:
        """Return the file of a cell's record."""
        return self.output / f"{cell.name}.json"

    def work_folder(self, cell: Cell) -> Path:
        """Return the folder that a cell works in."""
        return self.output / "work" / cell.name


# ---- Records ----


def read_record(cell: Cell, proof: Proof) -> Record | None:
    """Return the record of a cell that ran before, or None.

    A record of another device, or of --tiny against real shapes, does not count.
    """
    try:
        record = json.loads(proof.record_path(cell).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    is_same = record["device"] == proof.facts["device"] and record["tiny"] == proof.tiny
    return record if is_same else None


def is_done(record: Record | None, retry: bool = False) -> bool:
    """Return whether a cell need not run again.

    Skipped cells are tried again, since a package may have been installed.
    """
    if record is None or record["verdict"] == SKIPPED:
        return False
    unfinished = record["verdict"] in (FAILED, TIMED_OUT, NOT_OK)
    return not (unfinished and retry)


def reason_to_skip(cell: Cell, device: str) -> str:
    """Return why a cell cannot run here, or ""."""
    if cell.cuda_only and device == "cpu":
        return f"needs a GPU: {cell.cuda_only}"
    missing = [package for package in cell.needs if machine.version_of(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return ""


# ---- Processes, memory and files of a cell ----


def marked_processes(mark: str) -> list[int]:
    """Return the ids of the other living processes whose environment has MARK=mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        is_process = folder.name.isdigit()
        if not is_process or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            variables = (folder / "environ").read_bytes().split(b"\0")
            if wanted in variables:
                found.append(int(folder.name))
    return found


def kill_marked(mark: str) -> None:
    """Kill all processes with the mark, repeatedly, since they may start others meanwhile."""
    for _ in range(50):
        processes = marked_processes(mark)
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def wait_for_memory(before: float | None) -> float:
    """Wait until the GPU's memory in use is about what it was.

    before: MiB in use, None without a GPU. Returns the MiB that are still missing, 0 if none.
    """
    if before is None:
        return 0
    end = time.monotonic() + MEMORY_BACK
    while True:
        used = machine.gpu_memory_used() or 0
        left = used - before
        if left <= FREE_AGAIN_MIB:
            return 0
        if time.monotonic() > end:
            return left
        time.sleep(0.5)


def clean(folder: Path) -> None:
    """Delete what a finished cell no longer needs: weights and checkpoints, but no text files."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_symlink() or path.is_file():
            if path.suffix not in KEPT_SUFFIXES:
                path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def last_lines(work: Path) -> str:
    """Return the last lines that the cell's process printed, each cut to 300 characters."""
    text = (work / "log.txt").read_text(encoding="utf-8", errors="replace")
    last = text.splitlines()[-LAST_LINES:]
    return "\n".join(line[:300] for line in last)


# ---- One cell ----


def start(cell: Cell, proof: Proof, mark: str) -> subprocess.Popen:
    """Start the process of a cell in an empty folder; its output goes to log.txt there."""
    work = proof.work_folder(cell)
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command = [sys.executable, PROGRAM, "--worker", cell.name]
    command += ["--output", proof.output, "--device", proof.device]
    if proof.tiny:
        command.append("--tiny")
    if proof.most_seconds is not None:
        command += ["--most_seconds", proof.most_seconds]
    if proof.shares_gpu:
        command.append("--shares_gpu")
    environment = dict(os.environ)
    environment[MARK] = mark
    environment["HF_HUB_OFFLINE"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment.setdefault("OMP_NUM_THREADS", "1")
    with open(work / "log.txt", "w", encoding="utf-8") as log:
        return subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_cell(cell: Cell, proof: Proof) -> Record:
    """Run one cell, or skip it with the reason, and write its record; return the record."""
    begun = time.monotonic()
    record = {
        "cell": cell.name,
        "proves": cell.proves,
        "bound": cell.bound,
        "limit_seconds": proof.limit_of(cell),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "tiny": proof.tiny,
        "shares_gpu": proof.shares_gpu,
        **proof.facts,
    }
    reason = reason_to_skip(cell, proof.device)
    if reason:
        record |= {"verdict": SKIPPED, "error": reason, "seconds": 0, "rows": [], "commands": []}
    else:
        record |= watch(cell, proof)
        record["seconds"] = round(time.monotonic() - begun, 1)
    write_json(proof.record_path(cell), record)
    return record


def watch(cell: Cell, proof: Proof) -> Record:
    """Run a cell until its end or its limit; return verdict, error, rows and commands."""
    has_gpu_alone = proof.device == "cuda" and not proof.shares_gpu
    memory_before = machine.gpu_memory_used() if has_gpu_alone else None
    mark = f"{os.getpid()}.{cell.name}.{time.monotonic_ns()}"
    limit = proof.limit_of(cell)
    process = start(cell, proof, mark)
    try:
        code = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_marked(mark)
        process.wait()
    work = proof.work_folder(cell)
    found = read_outcome(work)
    verdict, error = judge(work, code, found, limit)
    found.pop("ok", None)
    if verdict == SKIPPED:
        del found["skipped"]  # the reason is the error
    found |= {"verdict": verdict, "error": error}
    still_held = wait_for_memory(memory_before)
    if still_held:
        found["gpu_memory_not_given_back_mib"] = still_held
    clean(work)
    return found


def judge(work: Path, code: int | None, found: Record, limit: int) -> tuple[str, str | None]:
    """Return the verdict on a cell that has ended, and the error or None.

    code: exit code of its process, None if that was killed at its limit. found: what it left.
    limit: seconds.
    """
    if code is None:
        return TIMED_OUT, f"killed after {limit} s\n{last_lines(work)}"
    if code == 0 and "skipped" in found:
        return SKIPPED, found["skipped"]
    if code != 0 or "ok" not in found:
        return FAILED, f"exit code {code}\n{last_lines(work)}"
    return VERDICTS[found["ok"]], None


def read_outcome(work: Path) -> Record:
    """Return what the cell left in its folder, without rows and commands if it left nothing."""
    empty = {"rows": [], "commands": []}
    try:
        return empty | json.loads((work / "outcome.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return empty


def work_as_cell(cell: Cell, setup: Setup) -> None:
    """Run a cell in this process and leave its outcome in the cell's folder."""
    try:
        outcome = cell.run(setup)
    except Skip as reason:
        write_json(setup.work / "outcome.json", {"skipped": str(reason)})
        return
    setup.keep(outcome)


# ---- All cells ----


def run_all(
    cells: Sequence[Cell],
    proof: Proof,
    minutes: float | None = None,
    retry: bool = False,
    show: Callable[[str], object] = print,
) -> list[Record]:
    """Run all cells that are not done, in their order, within `minutes`.

    A cell whose limit exceeds the remaining time is skipped with a line that says so; a later,
    shorter one may fit. show: called with a line about each cell. Returns the records of all cells
    that have one.
    """
    end = float("inf")
    if minutes is not None:
        end = time.monotonic() + minutes * 60
    records = []
    for cell in cells:
        record = read_record(cell, proof)
        if record is not None and is_done(record, retry):
            show(f"{record['verdict']:>9}  {cell.name}: done before")
            records.append(record)
            continue
        left = end - time.monotonic()
        limit = proof.limit_of(cell)
        is_skipped_at_once = bool(reason_to_skip(cell, proof.device))
        if left < limit and not is_skipped_at_once:
            seconds = f"{max(left, 0):.0f} s are left, its limit is {limit} s"
            show(f"{'no time':>9}  {cell.name}: {seconds}")
            continue
        record = run_cell(cell, proof)
        show(line_about(record))
        records.append(record)
    return records


def line_about(record: Record) -> str:
    """Return a line about a cell that has just run."""
    line = f"{record['verdict']:>9}  {record['cell']} ({record['seconds']:.0f} s)"
    if record["error"]:
        first_line = record["error"].splitlines()[0]
        line += f": {first_line}"
    return line
