# SPDX-License-Identifier: Apache-2.0
"""Launches of the shipped recipes under the shipped YAMLs on one GPU, for the cells beside this."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import net
from job import read_steps

REPO = Path(__file__).resolve().parents[2]
LOSS_BOUND = 2e-2  # relative, over 20 steps: bf16 keeps eight bits, TF32 and fp16 eleven
LIMIT = 600  # seconds of one launch
MOST_AT_ONCE = 6  # launches; each takes a core or two while it imports
# Words of scripts/make_tiny.py. ZeRO-3 leaves tensors below 100,000 elements whole; in the wide
# model, 67 million parameters, the state makes up most of a process's memory.
SHAPE = (
    "--hidden_size 320 --intermediate_size 640 --num_attention_heads 5 --num_key_value_heads 5 "
    "--num_train_rows 210 --num_test_rows 21"
)
WIDE = (
    "--hidden_size 1024 --intermediate_size 4096 --num_hidden_layers 4 --num_attention_heads 8 "
    "--num_train_rows 700 --num_test_rows 21"
)

Row = dict[str, Any]


@dataclass
class Cell:
    """What a test of this folder is given, and what it found.

    Attributes:
        on_gpu: False for a small form on a CPU.
        facts: name, driver and MiB of the GPU.
        models: folder of the models of all cells.
        work: this cell's own folder.
        claim: what it proves, with its bound, and whether that holds (None: only measured).
    """

    on_gpu: bool
    facts: dict[str, Any]
    models: Path
    work: Path
    claim: dict[str, Any] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    def proves(self, name: str, claim: str, bound: str = "") -> None:
        """Say what the cell proves. A test that fails keeps no row, so that the bound holds."""
        self.claim = {"cell": name, "proves": claim, "bound": bound}
        self.claim["holds"] = bool(bound) or None

    def job(self, *more: str, steps: int = 20) -> tuple[str, ...]:
        """Return the flags of a short job without evaluation or checkpoints, and further flags."""
        batch = "16"
        if not self.on_gpu:
            steps = min(steps, 6)
            batch = "4"
        flags = ["--max_steps", str(steps), "--per_device_train_batch_size", batch]
        flags += ["--learning_rate", "1e-3", "--eval_strategy", "no", "--save_steps", "0"]
        return (*flags, *more)

    def adapters(self, kind: str = "LoRA") -> tuple[str, ...]:
        """Return the flags of LoRA, or of LoRA on a base in int8, float8 or nf4."""
        dtype = "bfloat16" if self.on_gpu else "float32"  # that a CPU computes in
        return (*net.WEIGHTS[kind], "--dtype", dtype)

    def model(self, wide: bool = False) -> Path:
        """Return the folder of a small model and its rows, which is made once for all cells."""
        wide = wide and self.on_gpu
        folder = self.models / ("wide" if wide else "small")
        if not (folder / "data").exists():
            words = (WIDE if wide else SHAPE).split()
            net.make("llama", folder, words)
        return folder


@dataclass(frozen=True)
class Variant:
    """One way to run a job."""

    name: str
    config: str = "single"  # a YAML without its suffix
    precision: str = "bf16"
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trained:
    """A launch that ended with 0."""

    variant: Variant
    folder: Path
    row: Row
    steps: list[dict[str, Any]]  # lines of metrics.jsonl

    @property
    def losses(self) -> list[float]:
        """The loss of each step, in nats."""
        return [line["loss"] for line in self.steps]

    def held(self, kind: str) -> int:
        """Return the bytes of parameters, gradients or optimizer, from the shard report."""
        report = json.loads((self.folder / "report.json").read_text())
        return sum(row["held_bytes"] for row in report["rows"] if row["class"] == kind)


def nvidia_smi(query: str) -> list[str]:
    """Return what nvidia-smi says of the first GPU, by the names of a query; [] without one."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except OSError:
        return []
    if done.returncode or not done.stdout:
        return []
    first = done.stdout.splitlines()[0]
    return [word.strip() for word in first.split(",")]


def needs_compiler() -> None:
    """Skip the test if DeepSpeed could not compile its CPU optimizer."""
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        pytest.skip("DeepSpeed compiles its CPU optimizer: ninja and c++ must be on the PATH")


def command_of(cell: Cell, variant: Variant, data: Path, folder: Path) -> list[str]:
    """Return the command of a variant: scripts/rehearse.py, which also measures what ranks hold."""
    device = "cuda" if cell.on_gpu else "cpu"
    words: list[Any] = [sys.executable, "scripts/rehearse.py", "--device", device]
    words += ["--config_file", f"accelerate_configs/{variant.config}.yaml"]
    words += ["--report", folder / "report.json"]
    if cell.on_gpu:
        words += ["--num_processes", 1, "--mixed_precision", variant.precision]
    words += ["recipes/llama.py", "--model_name_or_path", data / "model"]
    words += ["--dataset_name", data / "data" / "train.jsonl"]
    words += ["--output_dir", folder / "run", *variant.flags]
    return [str(word) for word in words]


def train(cell: Cell, variant: Variant, data: Path) -> Trained:
    """Run one variant; a second call resumes from its newest checkpoint. Fails if it fails."""
    folder = cell.work / re.sub(r"\W+", "_", variant.name)
    folder.mkdir(parents=True, exist_ok=True)
    net.run(*command_of(cell, variant, data, folder), code=0, timeout=LIMIT)
    steps = read_steps(folder / "run")
    row: Row = {"what": variant.name, "result": "trained"}
    row |= {"first loss": round(steps[0]["loss"], 4), "last loss": round(steps[-1]["loss"], 4)}
    row["peak GiB"] = round(max(step["peak_memory_gib"] for step in steps), 3)
    return Trained(variant, folder, row, steps)


def train_all(cell: Cell, variants: Sequence[Variant], data: Path) -> list[Trained]:
    """Run variants, several at a time, in order; on a CPU the first two, one after the other.

    They share the GPU, so that their speed is meaningless. What needs FlashAttention's own package
    is left out where that is missing.
    """
    at_once = max(1, min(MOST_AT_ONCE, (os.cpu_count() or 2) // 2))
    if find_spec("flash_attn") is None:
        variants = [one for one in variants if "flash_attention_2" not in one.flags]
    if not cell.on_gpu:
        variants, at_once = variants[:2], 1
    with ThreadPoolExecutor(at_once) as pool:
        trained = list(pool.map(lambda variant: train(cell, variant, data), variants))
    cell.rows += [one.row for one in trained]
    return trained


def compare_with_first(cell: Cell, variants: Sequence[Variant]) -> None:
    """Run variants; the losses of each must be those of the first."""
    first, *others = train_all(cell, variants, cell.model())
    for one in [first, *others]:
        difference = largest_difference(one, first)
        one.row["from the first, relative"] = difference
        assert difference <= LOSS_BOUND, one.variant.name


def largest_difference(one: Trained, reference: Trained) -> float:
    """Return the largest relative difference in the loss of the steps that one has logged."""
    wanted = {line["step"]: line["loss"] for line in reference.steps}
    assert one.steps[-1]["step"] == reference.steps[-1]["step"]
    return max(abs(line["loss"] / wanted[line["step"]] - 1) for line in one.steps)


def falls(losses: Sequence[float]) -> bool:
    """Return whether the mean of the last three losses is below that of the first three."""
    return sum(losses[-3:]) < sum(losses[:3])
