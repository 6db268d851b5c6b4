"""A run that is stopped by a signal or killed, on a GPU: it saves, it resumes, and nothing keeps
the GPU's memory.
"""

import json
import os
import signal
import subprocess
import sys
import time

import parity

from . import launches, machine
from .cell import ROOT, Outcome
from .runner import FREE_AGAIN_MIB, MEMORY_BACK

STOPPED_AND_SAVED = 75
POLL = 0.2  # seconds


def start(setup, data, folder, steps):
    """Start the recipe as one plain process, in bf16 on a GPU; its exit code is then that of the
    recipe itself.
    """
    flags = ["--max_steps", steps, "--per_device_train_batch_size", 4, "--learning_rate", "1e-3"]
    flags += ["--eval_strategy", "no", "--save_steps", 5, "--save_total_limit", 2]
    command = [
        sys.executable,
        "recipes/llama.py",
        *parity.data_of(data),
        "--output_dir",
        folder,
        *flags,
    ]
    command = [str(word) for word in command]
    environment = dict(os.environ)
    if setup.device == "cuda":
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    log = open(f"{folder}.txt", "a", encoding="utf-8")  # noqa: SIM115  the process writes to it
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
    )
    return process, launches.printable(command, setup)


def wait_for_step(setup, process, folder, step):
    """Wait until a run has done a step; RuntimeError if it ends or the time runs out before."""
    while setup.seconds_left() > 0:
        steps = [line["step"] for line in whole_lines(folder / "metrics.jsonl")]
        if steps and steps[-1] >= step:
            return
        if process.poll() is not None:
            output = (folder.with_suffix(".txt")).read_text()
            raise RuntimeError(
                f"the run ended with {process.returncode}: {launches.error_of(output)}"
            )
        time.sleep(POLL)
    raise RuntimeError(f"step {step} was not reached in time")


def whole_lines(path):
    """The lines of a growing file of JSON lines, without one that is still being written."""
    if not path.exists():
        return []
    text = path.read_text()
    lines = text[: text.rfind("\n") + 1].splitlines()
    return [json.loads(line) for line in lines]


def memory_given_back(before):
    """Seconds until the GPU's memory in use is what it was, None if it is not after MEMORY_BACK
    seconds.
    """
    begun = time.monotonic()
    while before is not None:
        if (machine.gpu_memory_used() or 0) - before <= FREE_AGAIN_MIB:
            break
        if time.monotonic() - begun > MEMORY_BACK:
            return None
        time.sleep(POLL)
    return round(time.monotonic() - begun, 1)


def signals(setup):
    """SIGUSR1 ends a run with 75 and a checkpoint, SIGKILL at once; both resume, and no memory
    stays in use.
    """
    data = launches.tiny_model(setup)
    steps = 2000 if not setup.tiny else 400
    outcome = Outcome(ok=True)
    memory_before = machine.gpu_memory_used() if setup.device == "cuda" else None
    done = 0
    folder = setup.work / "run"
    for name, number, expected in (
        ("SIGUSR1", signal.SIGUSR1, STOPPED_AND_SAVED),
        ("SIGKILL", signal.SIGKILL, -9),
    ):
        process, command = start(setup, data, folder, steps)
        wait_for_step(setup, process, folder, done + 12)
        process.send_signal(number)
        code = process.wait(timeout=max(setup.seconds_left(), 1))
        back = memory_given_back(memory_before)
        saved = sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
        process, _ = start(setup, data, folder, steps)
        lines_before = whole_lines(folder / "metrics.jsonl")
        wait_for_step(setup, process, folder, lines_before[-1]["step"] + 2)
        process.kill()
        process.wait()
        output = folder.with_suffix(".txt").read_text()
        named = f"checkpoint-{saved[-1]}" in output if saved else False
        steps_after = [line["step"] for line in whole_lines(folder / "metrics.jsonl")]
        in_order = steps_after == list(range(1, len(steps_after) + 1))
        right = code == expected and bool(saved) and named and in_order and back is not None
        outcome.ok = outcome.ok and right
        outcome.rows.append(
            {
                "signal": name,
                "exit code": code,
                "newest checkpoint": saved[-1] if saved else None,
                "resumed from it": named,
                "steps in order": in_order,
                "seconds until the memory was free": back,
                "right": right,
            }
        )
        outcome.commands.append(command)
        setup.keep(outcome)
        done = steps_after[-1]
    return outcome
