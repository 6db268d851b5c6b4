# SPDX-License-Identifier: Apache-2.0
"""Launches of the shipped recipes under the shipped YAML files.

The launches of a cell are variants of one job.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import machine
from paths import ROOT
from proof import compare
from proof.jobs import MAKERS
from proof.launch import data_of

from .cell import Setup, Skip

MOST_AT_ONCE = 6  # launches of one cell; each takes a core or two while it imports
NO_TIME = "no time left"
# Command lines of scripts/make_tiny.py, without the folder
WIDE = (
    "llama --hidden_size 1024 --intermediate_size 4096 --num_hidden_layers 4 "
    "--num_attention_heads 8 --num_train_rows 700 --num_test_rows 21"
)
TINY_WIDE = "llama --num_train_rows 210 --num_test_rows 21"
QUANTIZATION = {
    "LoRA": (),
    "int8": ("--load_in_8bit",),
    "nf4": ("--load_in_4bit", "--bnb_4bit_use_double_quant"),
}


@dataclass(frozen=True)
class Variant:
    """One way to run a job."""

    name: str
    config: str = "single"  # a YAML without its suffix
    precision: str = "bf16"
    flags: tuple[str, ...] = ()
    recipe: str = "llama"
    left_out: str = ""  # why it is not run, "" if it is
    needs: tuple[str, ...] = ()  # packages without which it is left out


@dataclass(frozen=True)
class Finished:
    """A process that has ended, or was killed when the time ran out."""

    code: int | None  # None if it ran out of time
    output: str  # stdout and stderr together
    seconds: float

    @property
    def failure(self) -> str:
        """Why it failed, "" if it succeeded."""
        if self.code is None:
            return NO_TIME
        if self.code:
            return f"exit code {self.code}: {error_of(self.output)}"
        return ""


@dataclass(frozen=True)
class Trained:
    """A finished launch, or one that was not run."""

    variant: Variant
    code: int | None  # exit code, None if it was not run or ran out of time
    why: str = ""  # it did not train, "" if it did
    seconds: float = 0.0
    command: str = ""
    folder: Path = Path()
    steps: list[dict[str, Any]] = field(default_factory=list)  # lines of metrics.jsonl
    report: dict[str, Any] | None = None  # as proof/shard_report.py writes it

    @property
    def succeeded(self) -> bool:
        """Whether it ran and ended with 0."""
        return self.code == 0

    @property
    def losses(self) -> list[float]:
        """The loss of each step, in nats."""
        return [line["loss"] for line in self.steps]

    @property
    def peak_gib(self) -> float:
        """The most memory that it took, 0 before its first step."""
        return self.steps[-1]["peak_memory_gib"] if self.steps else 0.0


# ---- What is run ----


def job(setup: Setup, *more: Any, steps: int = 20, batch: int = 16) -> tuple[str, ...]:
    """Return the flags of a short job without evaluation or checkpoints.

    more: further flags; the last of a name counts.
    """
    if setup.tiny:
        steps = min(steps, 6)
        batch = 4
    flags = ["--max_steps", steps, "--per_device_train_batch_size", batch]
    flags += ["--learning_rate", "1e-3", "--eval_strategy", "no", "--save_steps", 0]
    flags += more
    return tuple(str(word) for word in flags)


def adapters(setup: Setup, kind: str = "LoRA") -> tuple[str, ...]:
    """Return the flags of LoRA, of LoRA on an int8 base ("int8") or of QLoRA ("nf4").

    A CPU computes in float32.
    """
    dtype = "bfloat16" if setup.on_gpu else "float32"
    return ("--use_peft", "--dtype", dtype, *QUANTIZATION[kind])


def only_on_gpu(setup: Setup, reason: str = "needs a GPU") -> str:
    """Return why a variant is left out on a CPU, "" on a GPU."""
    return "" if setup.on_gpu else reason


def made(folder: Path, command: Sequence[str]) -> Path:
    """Run a maker of a model once for all cells; return the folder with model/ and data/.

    command: the recipe's name and the flags of scripts/make_tiny.py.
    """
    done = folder / "done"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    recipe, *flags = command
    words = [sys.executable, ROOT / "scripts" / "make_tiny.py", recipe, folder, *flags]
    words = [str(word) for word in words]
    subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    done.touch()
    return folder


def tiny_model(setup: Setup, recipe: str = "llama") -> Path:
    """Return the small model and rows of a recipe: 2.25 million parameters, as in parity.py."""
    return made(setup.models / f"small_{recipe}", MAKERS[recipe])


def wide_model(setup: Setup) -> Path:
    """Return a model of 67 million parameters, whose state makes up most of a process's memory.

    With --tiny it is small.
    """
    if setup.tiny:
        return made(setup.models / "wide_tiny", TINY_WIDE.split())
    return made(setup.models / "wide", WIDE.split())


def command_of(setup: Setup, variant: Variant, data: Path, folder: Path) -> list[str]:
    """Return the command of a variant: scripts/rehearse.py, which also measures what ranks hold."""
    command = [sys.executable, "scripts/rehearse.py", "--device", setup.device]
    command += ["--config_file", f"accelerate_configs/{variant.config}.yaml"]
    command += ["--report", folder / "report.json"]
    if setup.on_gpu:
        command += ["--num_processes", 1, "--mixed_precision", variant.precision]
    command += [f"recipes/{variant.recipe}.py", *data_of(data)]
    command += ["--output_dir", folder / "run", *variant.flags]
    return [str(word) for word in command]


def printable(command: Sequence[str], setup: Setup) -> str:
    """Return a command line as text without this machine's paths."""
    text = shlex.join(command).replace(sys.executable, "python")
    return text.replace(str(setup.output), "RUNS").replace(f"{ROOT}/", "")


def reason_left_out(variant: Variant) -> str:
    """Return why a variant is not run here, or ""."""
    needs = list(variant.needs)
    if variant.config.startswith("deepspeed"):
        needs.append("deepspeed")
    if any("load_in" in flag or flag.endswith("bit") for flag in variant.flags):
        needs.append("bitsandbytes")
    missing = [package for package in needs if machine.version_of(package) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    return variant.left_out


def require_compiler() -> None:
    """Raise Skip if DeepSpeed could not compile its CPU optimizer."""
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        raise Skip(
            "DeepSpeed compiles its CPU optimizer: ninja and a C++ compiler must be on the PATH"
        )


def as_flags(words: Sequence[str]) -> dict[str, Any]:
    """Return the words of a command line as flags by name, True for one without a value."""
    flags: dict[str, Any] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            flags[name] = True
        else:
            flags[name] = word
    return flags


# ---- Running ----


def environment_of(setup: Setup, launched: bool = False) -> dict[str, str]:
    """Return the environment of a recipe: bf16 on a GPU, unless accelerate's launcher sets it."""
    environment = dict(os.environ)
    if not setup.on_gpu:
        environment["ACCELERATE_USE_CPU"] = "true"
        environment["CUDA_VISIBLE_DEVICES"] = ""
    elif not launched:
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    return environment


def finish(
    command: Sequence[str], environment: dict[str, str] | None = None, timeout: float | None = None
) -> Finished:
    """Run a command from the repository's root until its end, or until its time runs out."""
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return Finished(None, "", time.monotonic() - begun)
    return Finished(done.returncode, done.stdout, time.monotonic() - begun)


def train(setup: Setup, variant: Variant, data: Path) -> Trained:
    """Run one variant; a second call with the same one resumes from its newest checkpoint."""
    reason = reason_left_out(variant)
    if reason:
        return Trained(variant, None, f"left out: {reason}")
    timeout = setup.seconds_left()
    if timeout < 1:
        return Trained(variant, None, NO_TIME)
    folder = setup.work / re.sub(r"\W+", "_", variant.name)
    folder.mkdir(parents=True, exist_ok=True)
    command = command_of(setup, variant, data, folder)
    done = finish(command, timeout=timeout)
    steps = []
    report = None
    if done.code is not None:
        (folder / "output.txt").write_text(done.output)
        steps = read_steps(folder / "run")
        report = read_report(folder / "report.json")
    return Trained(
        variant,
        done.code,
        why=done.failure,
        seconds=done.seconds,
        command=printable(command, setup),
        folder=folder,
        steps=steps,
        report=report,
    )


def at_once(setup: Setup) -> int:
    """Return how many launches a cell may have at a time.

    They share the GPU, so that their speed is meaningless.
    """
    if not setup.on_gpu:
        return 1
    half_of_the_cores = (os.cpu_count() or 2) // 2
    return max(1, min(MOST_AT_ONCE, half_of_the_cores))


def train_all(setup: Setup, variants: Sequence[Variant], data: Path) -> list[Trained]:
    """Run variants, several at a time, and return them in order; with --tiny the first two."""
    if setup.tiny:
        variants = variants[:2]
    with ThreadPoolExecutor(at_once(setup)) as pool:
        return list(pool.map(lambda variant: train(setup, variant, data), variants))


# ---- What they wrote ----


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the training lines of a run's metrics.jsonl, [] if it does not exist."""
    if not (folder / "metrics.jsonl").exists():
        return []
    return compare.read_steps(folder)


def read_report(path: Path) -> dict[str, Any] | None:
    """Return a shard report, None if there is none."""
    return json.loads(path.read_text()) if path.exists() else None


def error_of(output: str) -> str:
    """Return the line of a program's output that says what went wrong."""
    lines = output.strip().splitlines() or ["no output"]
    errors = [line for line in lines if re.match(r"\s*(error: |[\w.]*(Error|Exception)\b)", line)]
    candidates = errors or lines
    return candidates[-1].strip()[:300]
