# SPDX-License-Identifier: Apache-2.0
"""A run on a GPU that is stopped by a signal, or killed.

It saves if it can, it resumes, and no process keeps memory of the GPU.
"""

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from exits import Exit
from paths import ROOT
from proof.launch import data_of

from . import launches
from .cell import Outcome, Setup
from .runner import wait_for_memory

EXIT_CODES = {signal.SIGUSR1: Exit.STOPPED, signal.SIGKILL: -9}
POLL = 0.2  # seconds
STEPS_BEFORE = 12  # steps that a run does before it is interrupted
STEPS_AFTER = 2  # steps that it does after it has resumed


def signals(setup: Setup) -> Outcome:
    """Check that a run resumes after either signal, and that no memory stays in use.

    SIGUSR1 ends it with 75 and a checkpoint, SIGKILL ends it at once.
    """
    data = launches.tiny_model(setup)
    memory_before = machine.gpu_memory_used() if setup.on_gpu else None
    run = Run(setup, data, setup.work / "run")
    outcome = Outcome(ok=True)
    for number, code in EXIT_CODES.items():
        row = stop_and_resume(run, number, memory_before)
        row["right"] = (
            row["exit code"] == code
            and row["resumed from it"]
            and row["steps in order"]
            and row["seconds until the memory was free"] is not None
        )
        outcome.require(row["right"])
        outcome.rows.append(row)
        outcome.commands.append(launches.printable(run.command(), setup))
        setup.keep(outcome)
    return outcome


@dataclass(frozen=True)
class Run:
    """A run of the recipe as one plain process, in bf16 on a GPU.

    The process's exit code is then that of the recipe itself.
    """

    setup: Setup
    data: Path  # folder of the model and its rows
    folder: Path

    @property
    def log(self) -> Path:
        """The file of everything that the run has printed, over all of its starts."""
        return self.folder.with_suffix(".txt")

    def command(self) -> list[str]:
        """Return its command line, with enough steps that it does not end by itself."""
        steps = 400 if self.setup.tiny else 2000
        command = [sys.executable, "recipes/llama.py", *data_of(self.data)]
        command += ["--output_dir", self.folder]
        command += ["--max_steps", steps, "--per_device_train_batch_size", 4]
        command += ["--learning_rate", "1e-3", "--eval_strategy", "no"]
        command += ["--save_steps", 5, "--save_total_limit", 2]
        return [str(word) for word in command]

    def start(self) -> subprocess.Popen:
        """Start or resume it."""
        with open(self.log, "a", encoding="utf-8") as log:  # The process keeps its own handle.
            return subprocess.Popen(
                self.command(),
                cwd=ROOT,
                env=launches.environment_of(self.setup),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def steps(self) -> list[int]:
        """Return the numbers of the steps that it has logged, [] before the first."""
        return [line["step"] for line in whole_lines(self.folder / "metrics.jsonl")]

    def last_step(self) -> int:
        """Return the number of the last step that it has logged, 0 before the first."""
        steps = self.steps()
        return steps[-1] if steps else 0

    def checkpoints(self) -> list[int]:
        """Return the numbers of the steps after which its checkpoints were saved, in order."""
        folders = self.folder.glob("checkpoint-*")
        return sorted(int(path.name.split("-")[1]) for path in folders)

    def wait_for_step(self, process: subprocess.Popen, step: int) -> None:
        """Wait until it has done a step.

        Raises RuntimeError if it ends, or if the time runs out, before.
        """
        while self.setup.seconds_left() > 0:
            if self.last_step() >= step:
                return
            if process.poll() is not None:
                error = launches.error_of(self.log.read_text())
                raise RuntimeError(f"the run ended with {process.returncode}: {error}")
            time.sleep(POLL)
        raise RuntimeError(f"step {step} was not reached in time")


def stop_and_resume(
    run: Run, number: signal.Signals, memory_before: float | None
) -> dict[str, Any]:
    """Start a run again, send it a signal, resume it, and return what happened."""
    last_done = run.last_step()
    process = run.start()
    run.wait_for_step(process, last_done + STEPS_BEFORE)
    process.send_signal(number)
    code = process.wait(timeout=max(run.setup.seconds_left(), 1))
    seconds = seconds_until_free(memory_before)
    saved = run.checkpoints()
    newest = saved[-1] if saved else None

    stopped_at = run.last_step()
    process = run.start()
    run.wait_for_step(process, stopped_at + STEPS_AFTER)
    process.kill()
    process.wait()
    logged = run.steps()
    return {
        "signal": number.name,
        "exit code": code,
        "newest checkpoint": newest,
        "resumed from it": newest is not None and f"checkpoint-{newest}" in run.log.read_text(),
        "steps in order": logged == list(range(1, len(logged) + 1)),
        "seconds until the memory was free": seconds,
    }


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a growing file of JSON lines, without one that is being written."""
    if not path.exists():
        return []
    text = path.read_text()
    end = text.rfind("\n") + 1
    return [json.loads(line) for line in text[:end].splitlines()]


def seconds_until_free(before: float | None) -> float | None:
    """Return the seconds until the GPU's memory in use is what it was, None if it stays in use.

    before: MiB, None without a GPU.
    """
    begun = time.monotonic()
    if wait_for_memory(before):
        return None
    return round(time.monotonic() - begun, 1)
