# SPDX-License-Identifier: Apache-2.0
"""A run on a GPU that is stopped or killed resumes, and no process keeps memory of the GPU."""

import os
import signal
import subprocess
import sys
import time

import pytest

from gpu.runs import LIMIT, REPO, nvidia_smi, read_steps

EXIT_CODES = {signal.SIGUSR1: 75, signal.SIGKILL: -9}
STEPS_BEFORE = 12  # steps that a run does before it is interrupted
STEPS_AFTER = 2  # steps that it does after it has resumed
FREE_AGAIN_MIB = 256  # of the GPU's memory in use, beside what was in use before
MEMORY_BACK = 20  # seconds until the driver has freed the memory of dead processes


def test_stop_and_kill(cell):
    claim = "SIGUSR1 saves and ends with 75, SIGKILL loses little, both resume"
    bound = "exit codes, every step once, the GPU's memory is free again"
    cell.proves("signals.stop_and_kill", claim, bound)
    folder = cell.work / "run"
    before = memory_used()
    for number, expected in EXIT_CODES.items():
        process = start(cell, folder)
        wait_for(process, folder, len(read_steps(folder)) + STEPS_BEFORE)
        process.send_signal(number)
        code = process.wait(timeout=LIMIT)
        assert code == expected
        end = time.monotonic() + MEMORY_BACK
        while memory_used() > before + FREE_AGAIN_MIB:
            assert time.monotonic() < end, "memory of the GPU stays in use"
            time.sleep(0.5)
        newest = max(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
        process = start(cell, folder)
        wait_for(process, folder, len(read_steps(folder)) + STEPS_AFTER)
        process.kill()
        process.wait()
        assert f"checkpoint-{newest}" in (cell.work / "log.txt").read_text()
        steps = [line["step"] for line in read_steps(folder)]
        assert steps == list(range(1, len(steps) + 1))
        cell.rows.append({"signal": number.name, "exit code": code, "newest checkpoint": newest})


def memory_used():
    """MiB in use on the GPU, by whatever process; 0 without one."""
    return float((nvidia_smi("memory.used") or [0])[0])


def start(cell, folder):
    """Start or resume the recipe as one plain process, which is too long to end by itself."""
    data = cell.model()
    command = [sys.executable, "recipes/llama.py", "--model_name_or_path", data / "model"]
    command += ["--dataset_name", data / "data" / "train.jsonl", "--output_dir", folder]
    command += ["--max_steps", "2000", "--per_device_train_batch_size", "4"]
    command += ["--eval_strategy", "no", "--save_steps", "5", "--save_total_limit", "2"]
    variables = {"ACCELERATE_MIXED_PRECISION": "bf16"}
    if not cell.on_gpu:
        variables = {"ACCELERATE_USE_CPU": "true"}
    with open(cell.work / "log.txt", "a") as log:  # The process keeps its own handle.
        return subprocess.Popen(
            command, cwd=REPO, env=os.environ | variables, stdout=log, stderr=log
        )


def wait_for(process, folder, step):
    """Wait until a run has done so many steps."""
    end = time.monotonic() + LIMIT
    while len(read_steps(folder)) < step:
        if process.poll() is not None or time.monotonic() > end:
            pytest.fail(f"step {step} was not reached")
        time.sleep(0.2)
