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
# Of a finished cell's files; all others, such as weights, are deleted
KEPT_SUFFIXES = (".json", ".jsonl", ".log", ".txt")
VERDICTS = {True: OK, False: NOT_OK, None: MEASURED}  # by whether the cell's bound holds


def record_path(output, cell):
    return output / f"{cell.name}.json"


def limit_of(cell, device):
    """Return the seconds after which a cell is killed."""
    return cell.limit * PATIENCE[device]


def read_record(output, cell, device, tiny):
    """Return the record of a cell that ran before, or None: on another device, or in tiny, it was another run."""
    try:
        record = json.loads(record_path(output, cell).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return record if (record["device"], record["tiny"]) == (device, tiny) else None


def is_done(record, retry=False):
    """Return whether a cell need not run again.

    Skipped cells are looked at anew, since a package may have been installed.
    """
    if record is None or record["verdict"] == SKIPPED:
        return False
    unfinished = record["verdict"] in (FAILED, TIMED_OUT, NOT_OK)
    return not (unfinished and retry)


def reason_to_skip(cell, device):
    """Return why a cell cannot run here, or ""."""
    if cell.cuda_only and device == "cpu":
        return f"needs a GPU: {cell.cuda_only}"
    missing = [package for package in cell.needs if machine.version_of(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return ""


def marked_processes(mark):
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


def clean(folder):
    """Delete what a finished cell does not need any more: weights and checkpoints, no texts."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_symlink() or path.is_file():
            if path.suffix not in KEPT_SUFFIXES:
                path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def start(cell, device, tiny, output):
    """Start the process of a cell; return it, its mark and its folder.

    Its output goes to OUTPUT/work/CELL/log.txt.
    """
    work = output / "work" / cell.name
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command = [sys.executable, PROGRAM, "--worker", cell.name]
    command += ["--output", output, "--device", device]
    if tiny:
        command.append("--tiny")
    mark = f"{os.getpid()}.{cell.name}.{time.monotonic_ns()}"
    environment = dict(os.environ)
    environment[MARK] = mark
    environment["HF_HUB_OFFLINE"] = "1"
    environment["TOKENIZERS_PARALLELISM"] = "false"
    environment.setdefault("OMP_NUM_THREADS", "1")
    with open(work / "log.txt", "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return process, mark, work


def run_cell(cell, device, tiny, output, facts):
    """Run one cell, or skip it with the reason, and write its record; return the record.

    facts: about the machine, which become a part of the record.
    """
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
    """Let a cell run until its end or its limit; return verdict, error, rows and commands."""
    memory_before = machine.gpu_memory_used() if device == "cuda" else None
    process, mark, work = start(cell, device, tiny, output)
    try:
        code = process.wait(timeout=limit_of(cell, device))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_marked(mark)
        process.wait()
    found = read_outcome(work)
    verdict, error = judge(cell, device, work, code, found)
    found.pop("ok", None)
    if verdict == SKIPPED:
        del found["skipped"]  # the reason is the error
    found |= {"verdict": verdict, "error": error}
    still_held = wait_for_memory(memory_before)
    if still_held:
        found["gpu_memory_not_given_back_mib"] = still_held
    clean(work)
    return found


def judge(cell, device, work, code, found):
    """Return (verdict, error or None) of a cell that has ended.

    code: exit code of its process, None if that was killed at its limit. found: what it left.
    """
    if code is None:
        return TIMED_OUT, f"killed after {limit_of(cell, device)} s\n{last_lines(work)}"
    if code == 0 and "skipped" in found:
        return SKIPPED, found["skipped"]
    if code != 0 or "ok" not in found:
        return FAILED, f"exit code {code}\n{last_lines(work)}"
    return VERDICTS[found["ok"]], None


def read_outcome(work):
    """Return what the cell left in its folder, without rows and commands if it left nothing."""
    empty = {"rows": [], "commands": []}
    try:
        return empty | json.loads((work / "outcome.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return empty


def last_lines(work):
    """Return the last lines that the cell's process printed, each cut to 300 characters."""
    text = (work / "log.txt").read_text(encoding="utf-8", errors="replace")
    last = text.splitlines()[-LAST_LINES:]
    return "\n".join(line[:300] for line in last)


def run_all(cells, device, tiny, output, facts, minutes=None, retry=False, show=print):
    """Run all cells that are not done, in their order, within `minutes`.

    A cell whose limit does not fit into the rest of the time is left out and said so; a later,
    shorter one may fit. show: function of a line about each cell. Returns the records of all cells
    that have one.
    """
    end = float("inf")
    if minutes is not None:
        end = time.monotonic() + minutes * 60
    records = []
    for cell in cells:
        record = read_record(output, cell, facts["device"], tiny)
        if is_done(record, retry):
            show(f"{record['verdict']:>9}  {cell.name}: done before")
            records.append(record)
            continue
        left = end - time.monotonic()
        limit = limit_of(cell, device)
        skipped_at_once = bool(reason_to_skip(cell, device))
        if left < limit and not skipped_at_once:
            seconds = f"{max(left, 0):.0f} s are left, its limit is {limit} s"
            show(f"{'no time':>9}  {cell.name}: {seconds}")
            continue
        record = run_cell(cell, device, tiny, output, facts)
        show(line_about(record))
        records.append(record)
    return records


def line_about(record):
    """Return the line that is shown of a cell that just ran."""
    line = f"{record['verdict']:>9}  {record['cell']} ({record['seconds']:.0f} s)"
    if record["error"]:
        first_line = record["error"].splitlines()[0]
        line += f": {first_line}"
    return line


def work_as_cell(cell, setup):
    """Run a cell in this process and leave its outcome in the cell's folder."""
    try:
        outcome = cell.run(setup)
    except Skip as reason:
        write_json(setup.work / "outcome.json", {"skipped": str(reason)})
        return
    setup.keep(outcome)
