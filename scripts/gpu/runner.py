"""Runs cells one after another, each in a process of its own, and writes one JSON for each.

A cell's processes all inherit a mark in their environment. At the end of a cell every process that
carries it is killed, also those that have moved to a session of their own, so that nothing holds
memory of the GPU when the next cell starts.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from . import machine
from .cell import FAILED, MEASURED, NOT_OK, OK, ROOT, SKIPPED, TIMED_OUT, Skip, write_json

MARK = "GPU_PROOF_CELL"
PROGRAM = ROOT / "scripts" / "gpu_proof.py"
LAST_LINES = 15
PATIENCE = {"cuda": 1, "cpu": 3}  # times a cell's limit: imports alone take a loaded CPU a minute
MEMORY_BACK = 20  # seconds to wait until the driver has given the memory of dead processes back
FREE_AGAIN_MIB = 256  # how far above its start the GPU's memory in use may be after a cell
KEPT_SUFFIXES = (
    ".json",
    ".jsonl",
    ".log",
    ".txt",
)  # of a finished cell's files; weights are deleted


def record_path(output, cell):
    return output / f"{cell.name}.json"


def limit_of(cell, device):
    """Seconds after which a cell is killed."""
    return cell.limit * PATIENCE[device]


def read_record(output, cell):
    """The record of a cell that ran before, or None."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        return json.loads(record_path(output, cell).read_text())
    return None


def is_done(record, retry=False):
    """Whether a cell need not run again. Skipped cells are looked at anew, since a package may have
    been installed.
    """
    if record is None or record["verdict"] == SKIPPED:
        return False
    unfinished = record["verdict"] in (FAILED, TIMED_OUT, NOT_OK)
    return not (unfinished and retry)


def reason_to_skip(cell, device):
    """Why a cell cannot run here, or ""."""
    if cell.cuda_only and device == "cpu":
        return f"needs a GPU: {cell.cuda_only}"
    missing = [package for package in cell.needs if machine.version_of(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return ""


def marked_processes(mark):
    """Ids of the living processes whose environment has MARK=mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # ended meanwhile, or of another user
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def kill_marked(mark):
    """Kill what carries the mark until nothing does; a process may start another one meanwhile."""
    for _ in range(50):
        processes = marked_processes(mark)
        if not processes:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)


def wait_for_memory(before):
    """Wait until the GPU's memory in use is about what it was; returns MiB that are still missing,
    0 if none.
    """
    if before is None:
        return 0
    end = time.monotonic() + MEMORY_BACK
    while True:
        left = (machine.gpu_memory_used() or 0) - before
        if left <= FREE_AGAIN_MIB:
            return 0
        if time.monotonic() > end:
            return left
        time.sleep(0.5)


def clean(folder):
    """Delete what a finished cell does not need any more: weights and checkpoints, no texts."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_symlink() or path.is_file():
            if path.suffix not in KEPT_SUFFIXES:
                path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def start(cell, device, tiny, output):
    """Start the process of a cell; its output goes to OUTPUT/work/CELL/log.txt."""
    work = output / "work" / cell.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command = [
        sys.executable,
        str(PROGRAM),
        "--worker",
        cell.name,
        "--output",
        str(output),
        "--device",
        device,
    ]
    if tiny:
        command.append("--tiny")
    mark = f"{os.getpid()}.{cell.name}.{time.monotonic_ns()}"
    environment = {
        **os.environ,
        MARK: mark,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    with open(work / "log.txt", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, mark, work


def run_cell(cell, device, tiny, output, facts):
    """Run one cell and write its record; returns the record."""
    begun = time.monotonic()
    record = {
        "cell": cell.name,
        "proves": cell.proves,
        "bound": cell.bound,
        "limit_seconds": limit_of(cell, device),
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "tiny": tiny,
        **facts,
    }
    reason = reason_to_skip(cell, device)
    if reason:
        record |= {"verdict": SKIPPED, "error": reason, "seconds": 0, "rows": [], "commands": []}
    else:
        record |= watch(cell, device, tiny, output)
        record["seconds"] = round(time.monotonic() - begun, 1)
    write_json(record_path(output, cell), record)
    return record


def watch(cell, device, tiny, output):
    """Let a cell run until its end or its limit; returns verdict, error, rows and commands."""
    memory_before = machine.gpu_memory_used() if device == "cuda" else None
    process, mark, work = start(cell, device, tiny, output)
    timed_out = False
    try:
        code = process.wait(timeout=limit_of(cell, device))
    except subprocess.TimeoutExpired:
        timed_out, code = True, None
    finally:
        kill_marked(mark)
        process.wait()
    found = read_outcome(work)
    if timed_out:
        found |= {
            "verdict": TIMED_OUT,
            "error": f"killed after {limit_of(cell, device)} s\n{last_lines(work)}",
        }
    elif code == 0 and "skipped" in found:
        found |= {"verdict": SKIPPED, "error": found.pop("skipped")}
    elif code != 0 or "ok" not in found:
        found |= {"verdict": FAILED, "error": f"exit code {code}\n{last_lines(work)}"}
    else:
        found |= {"verdict": {True: OK, False: NOT_OK, None: MEASURED}[found["ok"]], "error": None}
    found.pop("ok", None)
    still_held = wait_for_memory(memory_before)
    if still_held:
        found["gpu_memory_not_given_back_mib"] = still_held
    clean(work)
    return found


def read_outcome(work):
    """What the cell left in its folder; empty rows if nothing."""
    empty = {"rows": [], "commands": []}
    try:
        return empty | json.loads((work / "outcome.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return empty


def last_lines(work):
    """The last lines that the cell's process printed."""
    lines = (work / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(line[:300] for line in lines[-LAST_LINES:])


def run_all(cells, device, tiny, output, facts, minutes=None, retry=False, show=print):
    """Run all cells that are not done, in their order, within `minutes`; returns the records of all
    that have one.

    A cell whose limit does not fit into the rest of the time is left out and said so; a later,
    shorter one may fit.
    """
    begun, records = time.monotonic(), []
    for cell in cells:
        known = read_record(output, cell)
        if is_done(known, retry):
            show(f"{known['verdict']:>9}  {cell.name}: done before")
            records.append(known)
            continue
        skipped_at_once = bool(reason_to_skip(cell, device))
        left = None if minutes is None else minutes * 60 - (time.monotonic() - begun)
        limit = limit_of(cell, device)
        if left is not None and left < limit and not skipped_at_once:
            show(
                f"{'no time':>9}  {cell.name}: {max(left, 0):.0f} s are left, "
                f"its limit is {limit} s"
            )
            continue
        record = run_cell(cell, device, tiny, output, facts)
        first_line = (record["error"] or "").splitlines()[:1]
        why = f": {first_line[0]}" if first_line else ""
        show(f"{record['verdict']:>9}  {cell.name} ({record['seconds']:.0f} s){why}")
        records.append(record)
    return records


def work_as_cell(cell, setup):
    """What the process of a cell does: run it and leave its outcome in the cell's folder."""
    try:
        outcome = cell.run(setup)
    except Skip as reason:
        write_json(setup.work / "outcome.json", {"skipped": str(reason)})
        return
    setup.keep(outcome)
