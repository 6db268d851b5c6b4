"""A run on a GPU that is stopped by a signal, or killed.

It saves where it can, it resumes, and nothing keeps the GPU's memory.
"""

import json
import os
import signal
import subprocess
import sys
import time

from proof.launch import data_of

from . import launches, machine
from .cell import ROOT, Outcome
from .runner import FREE_AGAIN_MIB, MEMORY_BACK

STOPPED_AND_SAVED = 75  # exit code of a recipe
EXIT_CODES = {signal.SIGUSR1: STOPPED_AND_SAVED, signal.SIGKILL: -9}
POLL = 0.2  # seconds


def start(setup, data, folder, steps):
    """Start the recipe as one plain process, in bf16 on a GPU; return it and its command line.

    The process's exit code is then that of the recipe itself.
    """
    command = [sys.executable, "recipes/llama.py", *data_of(data), "--output_dir", folder]
    command += ["--max_steps", steps, "--per_device_train_batch_size", 4]
    command += ["--learning_rate", "1e-3", "--eval_strategy", "no"]
    command += ["--save_steps", 5, "--save_total_limit", 2]
    command = [str(word) for word in command]
    environment = dict(os.environ)
    if setup.device == "cuda":
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    with open(f"{folder}.txt", "a", encoding="utf-8") as log:  # the process keeps its own handle
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    return process, launches.printable(command, setup)


def wait_for_step(setup, process, folder, step):
    """Wait until a run has done a step; RuntimeError if it ends or the time runs out before."""
    while setup.seconds_left() > 0:
        done = steps_of(folder)
        if done and done[-1] >= step:
            return
        if process.poll() is not None:
            error = launches.error_of(folder.with_suffix(".txt").read_text())
            raise RuntimeError(f"the run ended with {process.returncode}: {error}")
        time.sleep(POLL)
    raise RuntimeError(f"step {step} was not reached in time")


def steps_of(folder):
    """Return the numbers of the steps that a run has logged, [] before the first."""
    return [line["step"] for line in whole_lines(folder / "metrics.jsonl")]


def whole_lines(path):
    """Return the lines of a growing file of JSON lines, without one that is still being written."""
    if not path.exists():
        return []
    text = path.read_text()
    end = text.rfind("\n") + 1
    return [json.loads(line) for line in text[:end].splitlines()]


def checkpoints_of(folder):
    """Return the numbers of the steps after which a run's checkpoints were saved, in order."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def memory_given_back(before):
    """Return the seconds until the GPU's memory in use is what it was.

    before: MiB, None without a GPU. Returns None if it is not given back after MEMORY_BACK seconds.
    """
    begun = time.monotonic()
    while before is not None:
        used = machine.gpu_memory_used() or 0
        if used - before <= FREE_AGAIN_MIB:
            break
        if time.monotonic() - begun > MEMORY_BACK:
            return None
        time.sleep(POLL)
    return round(time.monotonic() - begun, 1)


def signals(setup):
    """Both signals end a run, from which it resumes, and no memory stays in use.

    SIGUSR1 ends it with 75 and a checkpoint, SIGKILL at once.
    """
    data = launches.tiny_model(setup)
    memory_before = machine.gpu_memory_used() if setup.device == "cuda" else None
    outcome = Outcome(ok=True)
    for number in EXIT_CODES:
        row, command = stop_and_resume(setup, data, number, memory_before)
        outcome.ok = outcome.ok and row["right"]
        outcome.rows.append(row)
        outcome.commands.append(command)
        setup.keep(outcome)
    return outcome


def stop_and_resume(setup, data, number, memory_before):
    """Start the run again, send it a signal, and resume it; return (row, command line)."""
    folder = setup.work / "run"
    steps = 400 if setup.tiny else 2000  # so many that it does not end by itself
    done = steps_of(folder)
    last_done = done[-1] if done else 0
    process, command = start(setup, data, folder, steps)
    wait_for_step(setup, process, folder, last_done + 12)
    process.send_signal(number)
    code = process.wait(timeout=max(setup.seconds_left(), 1))
    seconds = memory_given_back(memory_before)
    saved = checkpoints_of(folder)
    newest = saved[-1] if saved else None

    stopped_at = steps_of(folder)[-1]
    process, _ = start(setup, data, folder, steps)
    wait_for_step(setup, process, folder, stopped_at + 2)
    process.kill()
    process.wait()
    output = folder.with_suffix(".txt").read_text()
    resumed = bool(saved) and f"checkpoint-{newest}" in output
    logged = steps_of(folder)
    in_order = logged == list(range(1, len(logged) + 1))
    freed = seconds is not None
    row = {
        "signal": number.name,
        "exit code": code,
        "newest checkpoint": newest,
        "resumed from it": resumed,
        "steps in order": in_order,
        "seconds until the memory was free": seconds,
        "right": code == EXIT_CODES[number] and resumed and in_order and freed,
    }
    return row, command
