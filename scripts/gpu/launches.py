"""Launches of the shipped recipes under the shipped YAML files, as variants of one job, and what
they wrote.
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

import parity

from . import machine
from .cell import ROOT

CONFIGS = ROOT / "accelerate_configs"
MOST_AT_ONCE = 6  # launches of one cell; each takes a core or two while it imports
WIDE = (
    "make_tiny_model.py",
    "--hidden_size",
    "1024",
    "--intermediate_size",
    "4096",
    "--num_hidden_layers",
    "4",
    "--num_attention_heads",
    "8",
    "--num_train_rows",
    "700",
    "--num_test_rows",
    "21",
)
TINY_WIDE = ("make_tiny_model.py", "--num_train_rows", "210", "--num_test_rows", "21")


@dataclass(frozen=True)
class Variant:
    """One way to run a job. left_out: why it is not run, "" if it is; needs: packages it is left
    out without.
    """

    name: str
    config: str = "single"
    precision: str = "bf16"
    flags: tuple = ()
    recipe: str = "llama"
    left_out: str = ""
    needs: tuple = ()


@dataclass
class Trained:
    """A finished launch. code: exit code, None if it was not run or had no time; why: a sentence in
    that case.
    """

    variant: Variant
    code: int | None
    why: str = ""
    seconds: float = 0.0
    command: str = ""
    output: str = ""
    folder: Path | None = None
    steps: list = field(default_factory=list)
    report: dict | None = None

    @property
    def losses(self):
        return [line["loss"] for line in self.steps]

    @property
    def peak_gib(self):
        return self.steps[-1]["peak_memory_gib"] if self.steps else None


def job(setup, *more, steps=20, batch=16):
    """Flags of a short job without evaluation or checkpoints; the last of a name counts."""
    if setup.tiny:
        steps, batch = min(steps, 6), 4
    common = [
        "--max_steps",
        steps,
        "--per_device_train_batch_size",
        batch,
        "--learning_rate",
        "1e-3",
    ]
    common += ["--eval_strategy", "no", "--save_steps", 0]
    return tuple(str(word) for word in (*common, *more))


def adapters(setup, kind="LoRA"):
    """Flags of LoRA, of LoRA on an int8 base ("int8") or of QLoRA ("nf4"); a CPU computes in
    float32.
    """
    dtype = "bfloat16" if setup.device == "cuda" else "float32"
    quantized = {
        "LoRA": (),
        "int8": ("--load_in_8bit",),
        "nf4": ("--load_in_4bit", "--bnb_4bit_use_double_quant"),
    }
    return ("--use_peft", "--dtype", dtype, *quantized[kind])


def made(folder, command):
    """Run a maker of a model once for all cells; returns the folder with model/ and data/."""
    done = folder / "done"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        script = ROOT / "scripts" / command[0]
        words = [sys.executable, str(script), str(folder), *[str(word) for word in command[1:]]]
        subprocess.run(words, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        done.touch()
    return folder


def tiny_model(setup, recipe="llama"):
    """The small model and rows of a recipe: 2.25 million parameters, as in scripts/parity.py."""
    return made(setup.models / f"small_{recipe}", parity.MAKERS[recipe])


def wide_model(setup):
    """A model of 67 million parameters, so that its state stands out of a process's memory; small
    with --tiny.
    """
    if setup.tiny:
        return made(setup.models / "wide_tiny", TINY_WIDE)
    return made(setup.models / "wide", WIDE)


def command_of(setup, variant, data, folder):
    """The command of a variant: scripts/rehearse.py, which also measures what ranks hold."""
    command = [sys.executable, "scripts/rehearse.py", "--device", setup.device]
    command += ["--config_file", f"accelerate_configs/{variant.config}.yaml"]
    command += ["--report", folder / "report.json"]
    if setup.device == "cuda":
        command += ["--num_processes", 1, "--mixed_precision", variant.precision]
    command += [
        f"recipes/{variant.recipe}.py",
        *parity.data_of(data),
        "--output_dir",
        folder / "run",
        *variant.flags,
    ]
    return [str(word) for word in command]


def printable(command, setup):
    """A command line as text that holds anywhere: no absolute paths of this machine."""
    text = shlex.join(command).replace(sys.executable, "python")
    return text.replace(str(setup.output), "RUNS").replace(f"{ROOT}/", "")


def reason_left_out(setup, variant):
    """Why a variant is not run here, or ""."""
    missing = [package for package in variant.needs if machine.version_of(package) is None]
    if variant.config.startswith("deepspeed") and machine.version_of("deepspeed") is None:
        missing.append("deepspeed")
    if any("load_in" in flag or flag.endswith("bit") for flag in variant.flags):
        if machine.version_of("bitsandbytes") is None:
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
        output = error.stdout.decode(errors="replace") if error.stdout else ""
        return Trained(
            variant,
            None,
            "no time left",
            setup.seconds_left(),
            printable(command, setup),
            output,
            folder,
        )
    (folder / "output.txt").write_text(done.stdout)
    report = folder / "report.json"
    trained = Trained(
        variant,
        done.returncode,
        "",
        time.monotonic() - begun,
        printable(command, setup),
        done.stdout,
        folder,
    )
    trained.steps = read_steps(folder / "run")
    trained.report = json.loads(report.read_text()) if report.exists() else None
    if done.returncode:
        trained.why = f"exit code {done.returncode}: {error_of(done.stdout)}"
    return trained


def at_once(setup):
    """How many launches a cell may have at a time: they share the GPU, so this is not for speed."""
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
    """The training lines of a run's metrics.jsonl; [] if there is none."""
    path = Path(folder) / "metrics.jsonl"
    return parity.read_steps(folder) if path.exists() else []


def error_of(output):
    """The line of a program's output that says what went wrong."""
    lines = output.strip().splitlines() or ["no output"]
    errors = [line for line in lines if re.match(r"\s*(error: |[\w.]*(Error|Exception)\b)", line)]
    return (errors or lines)[-1].strip()[:300]


def falls(losses):
    """Whether the mean of the last losses is below that of the first ones."""
    if len(losses) < 2 or None in losses:
        return False
    few = max(1, min(3, len(losses) // 2))
    return sum(losses[-few:]) < sum(losses[:few])


def largest_difference(steps, reference):
    """The largest relative difference in the loss of two runs, over the steps that the first one
    logged.

    Infinite if that is none, if the reference ends at another step or lacks one, or if a loss is
    not finite.
    """
    losses = {line["step"]: line["loss"] for line in reference}
    if not steps or not reference or steps[-1]["step"] != reference[-1]["step"]:
        return float("inf")
    largest = 0.0
    for line in steps:
        wanted = losses.get(line["step"])
        if wanted is None or line["loss"] is None:
            return float("inf")
        largest = max(largest, abs(line["loss"] / wanted - 1))
    return largest


def row_of(trained):
    """The columns that every table of launches has."""
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
    """Bytes of one kind (parameters, gradients, optimizer) that the process held, from the shard
    report.
    """
    rows = (trained.report or {}).get("rows", [])
    return sum(row["held_bytes"] for row in rows if row["class"] == kind and row["rank"] == 0)


def failed(trained):
    """Whether a launch that should have trained did not; one that was left out is none."""
    return trained.code != 0 and not trained.why.startswith("left out")
