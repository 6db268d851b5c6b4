"""Launches of the shipped recipes under the shipped YAML files, and what they wrote.

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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from proof import compare
from proof.jobs import MAKERS
from proof.launch import data_of

from . import machine
from .cell import ROOT

CONFIGS = ROOT / "accelerate_configs"
MOST_AT_ONCE = 6  # launches of one cell; each takes a core or two while it imports
# Command lines of scripts/make_tiny.py, without the folder
WIDE = tuple(
    "llama --hidden_size 1024 --intermediate_size 4096 --num_hidden_layers 4 "
    "--num_attention_heads 8 --num_train_rows 700 --num_test_rows 21".split()
)
TINY_WIDE = ("llama", "--num_train_rows", "210", "--num_test_rows", "21")


@dataclass(frozen=True)
class Variant:
    """One way to run a job."""

    name: str
    config: str = "single"
    precision: str = "bf16"
    flags: tuple = ()
    recipe: str = "llama"
    left_out: str = ""  # why it is not run, "" if it is
    needs: tuple = ()  # packages without which it is left out


@dataclass
class Trained:
    """A finished launch, or one that was not run."""

    variant: Variant
    code: int | None  # exit code, None if it was not run or had no time
    why: str = ""  # it did not train, "" if it did
    seconds: float = 0.0
    command: str = ""
    output: str = ""
    folder: Path | None = None
    steps: list = field(default_factory=list)  # lines of metrics.jsonl
    report: dict | None = None  # of scripts/shard_report.py

    @property
    def losses(self):
        return [line["loss"] for line in self.steps]

    @property
    def peak_gib(self):
        return self.steps[-1]["peak_memory_gib"] if self.steps else None


def job(setup, *more, steps=20, batch=16):
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


def adapters(setup, kind="LoRA"):
    """Return the flags of LoRA, of LoRA on an int8 base ("int8") or of QLoRA ("nf4").

    A CPU computes in float32.
    """
    dtype = "bfloat16" if setup.device == "cuda" else "float32"
    quantized = {
        "LoRA": (),
        "int8": ("--load_in_8bit",),
        "nf4": ("--load_in_4bit", "--bnb_4bit_use_double_quant"),
    }
    return ("--use_peft", "--dtype", dtype, *quantized[kind])


def made(folder, command):
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


def tiny_model(setup, recipe="llama"):
    """Return the small model and rows of a recipe: 2.25 million parameters, as in parity.py."""
    return made(setup.models / f"small_{recipe}", MAKERS[recipe])


def wide_model(setup):
    """Return a model of 67 million parameters, whose state stands out of a process's memory.

    With --tiny it is small.
    """
    if setup.tiny:
        return made(setup.models / "wide_tiny", TINY_WIDE)
    return made(setup.models / "wide", WIDE)


def command_of(setup, variant, data, folder):
    """Return the command of a variant: scripts/rehearse.py, which also measures what ranks hold."""
    command = [sys.executable, "scripts/rehearse.py", "--device", setup.device]
    command += ["--config_file", f"accelerate_configs/{variant.config}.yaml"]
    command += ["--report", folder / "report.json"]
    if setup.device == "cuda":
        command += ["--num_processes", 1, "--mixed_precision", variant.precision]
    command += [f"recipes/{variant.recipe}.py", *data_of(data)]
    command += ["--output_dir", folder / "run", *variant.flags]
    return [str(word) for word in command]


def printable(command, setup):
    """Return a command line as text that holds anywhere, without this machine's absolute paths."""
    text = shlex.join(command).replace(sys.executable, "python")
    return text.replace(str(setup.output), "RUNS").replace(f"{ROOT}/", "")


def reason_left_out(setup, variant):
    """Return why a variant is not run here, or ""."""
    missing = [package for package in variant.needs if machine.version_of(package) is None]
    if variant.config.startswith("deepspeed") and machine.version_of("deepspeed") is None:
        missing.append("deepspeed")
    quantizes = any("load_in" in flag or flag.endswith("bit") for flag in variant.flags)
    if quantizes and machine.version_of("bitsandbytes") is None:
        missing.append("bitsandbytes")
    if missing:
        return f"not installed: {', '.join(missing)}"
    return variant.left_out


def train(setup, variant, data, folder=None):
    """Run one variant; a second call with the same folder resumes from its newest checkpoint."""
    reason = reason_left_out(setup, variant)
    if reason:
        return Trained(variant, None, f"left out: {reason}")
    if setup.seconds_left() < 1:
        return Trained(variant, None, "no time left")
    folder = folder or setup.work / re.sub(r"\W+", "_", variant.name)
    folder.mkdir(parents=True, exist_ok=True)
    command = command_of(setup, variant, data, folder)
    trained = Trained(variant, None, command=printable(command, setup), folder=folder)
    begun = time.monotonic()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=dict(os.environ),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=setup.seconds_left(),
        )
    except subprocess.TimeoutExpired as error:
        trained.why = "no time left"
        trained.seconds = setup.seconds_left()
        if error.stdout:
            trained.output = error.stdout.decode(errors="replace")
        return trained
    trained.seconds = time.monotonic() - begun
    trained.code = done.returncode
    trained.output = done.stdout
    (folder / "output.txt").write_text(done.stdout)
    trained.steps = read_steps(folder / "run")
    report = folder / "report.json"
    if report.exists():
        trained.report = json.loads(report.read_text())
    if done.returncode:
        trained.why = f"exit code {done.returncode}: {error_of(done.stdout)}"
    return trained


def at_once(setup):
    """Return how many launches a cell may have at a time.

    They share the GPU, so their speed says nothing.
    """
    if setup.device == "cpu":
        return 1
    return max(1, min(MOST_AT_ONCE, (os.cpu_count() or 2) // 2))


def train_all(setup, variants, data):
    """Run variants, several at a time, and return them in order; with --tiny the first two."""
    if setup.tiny:
        variants = variants[:2]
    with ThreadPoolExecutor(at_once(setup)) as pool:
        return list(pool.map(lambda variant: train(setup, variant, data), variants))


def read_steps(folder):
    """Return the training lines of a run's metrics.jsonl; [] if there is none."""
    path = Path(folder) / "metrics.jsonl"
    return compare.read_steps(folder) if path.exists() else []


def error_of(output):
    """Return the line of a program's output that says what went wrong."""
    lines = output.strip().splitlines() or ["no output"]
    errors = [line for line in lines if re.match(r"\s*(error: |[\w.]*(Error|Exception)\b)", line)]
    return (errors or lines)[-1].strip()[:300]


def falls(losses):
    """Return whether the mean of the last losses is below that of the first ones."""
    if len(losses) < 2 or None in losses:
        return False
    few = max(1, min(3, len(losses) // 2))
    return sum(losses[-few:]) < sum(losses[:few])


def largest_difference(steps, reference):
    """Return the largest relative difference in the loss of two runs, step by step.

    The steps are those that the first run logged. The result is infinite if there are none, if the
    reference ends at another step or lacks one, or if a loss is not finite.
    """
    if not steps or not reference or steps[-1]["step"] != reference[-1]["step"]:
        return float("inf")
    reference_losses = {line["step"]: line["loss"] for line in reference}
    largest = 0.0
    for line in steps:
        loss = line["loss"]
        wanted = reference_losses.get(line["step"])
        if wanted is None or loss is None:
            return float("inf")
        largest = max(largest, abs(loss / wanted - 1))
    return largest


def row_of(trained):
    """Return the columns that every table of launches has."""
    row = {"what": trained.variant.name}
    if trained.code is None or trained.why:
        return row | {"result": trained.why}
    return row | {
        "result": "trained",
        "first loss": round(trained.losses[0], 4),
        "last loss": round(trained.losses[-1], 4),
        "peak GiB": round(trained.peak_gib, 3),
        "seconds": round(trained.seconds, 1),
    }


def held(trained, kind):
    """Return the bytes of one kind that the process held, from the shard report.

    kind: "parameters", "gradients" or "optimizer".
    """
    report = trained.report or {}
    held_bytes = 0
    for row in report.get("rows", []):
        if row["class"] == kind and row["rank"] == 0:
            held_bytes += row["held_bytes"]
    return held_bytes


def failed(trained):
    """Return whether a launch that should have trained did not; one left out has not failed."""
    return trained.code != 0 and not trained.why.startswith("left out")
