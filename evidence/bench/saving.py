# SPDX-License-Identifier: Apache-2.0
"""Runs that save, and the seconds for which their training is held up."""

import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paths import RECIPES
from proof.launch import ENVIRONMENT, data_of, make_model, rehearsal

RANK = Path(__file__).with_name("saving_rank.py")
# 97 million parameters
MODEL: list[str] = [
    *"llama --hidden_size 768 --intermediate_size 2048 --num_hidden_layers 12".split(),
    *"--num_attention_heads 12 --num_key_value_heads 12 --vocab_size 8000".split(),
    *"--num_train_rows 40 --num_test_rows 4".split(),
]
STEPS_PER_SAVE = 6
OUTPUT = "out"  # folder of the run
FLAGS = [
    *"--per_device_train_batch_size 1 --max_length 64 --eval_strategy no".split(),
    *f"--save_steps {STEPS_PER_SAVE} --save_total_limit 1".split(),
]


@dataclass(frozen=True)
class Job:
    """A run to measure.

    Attributes:
        ranks: 1 is one process; more are under fsdp2_full_shard.yaml.
        in_background: whether it has --async_save.
        saves: how many are measured.
    """

    ranks: int
    in_background: bool
    saves: int

    @property
    def steps(self) -> int:
        """Its steps; the last of them is no measured save."""
        return STEPS_PER_SAVE * (self.saves + 1)


class RunError(Exception):
    """A run has failed."""


def make_model_and_rows(folder: Path) -> None:
    """Write the model and short rows."""
    make_model(folder, MODEL)


def measure(job: Job, tiny: Path, folder: Path) -> dict[str, Any]:
    """Train, and return how long training was held up as a row of the table.

    Args:
        tiny: of `make_model_and_rows`.
        folder: for the run and its measurements; what is in it is deleted.

    Raises:
        RunError: the run has failed, with the end of what it said.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    done = subprocess.run(
        [str(word) for word in command_of(job, tiny, folder)],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RunError(done.stdout[-3000:])
    ranks = []
    for path in sorted(folder.glob("*.json")):
        ranks.append(json.loads(path.read_text()))
    size = 0
    for path in (folder / OUTPUT).glob("checkpoint-*/*"):
        size += path.stat().st_size
    shutil.rmtree(folder)
    seconds = seconds_of(ranks, job.saves)
    return asdict(job) | {"checkpoint_bytes": size} | seconds


def command_of(job: Job, tiny: Path, folder: Path) -> list[Any]:
    """Return the words that start a run, which writes its measurements into a folder."""
    command: list[Any] = [sys.executable]
    if job.ranks > 1:
        command = rehearsal("fsdp2_full_shard", job.ranks)
    command += [RANK, folder, RECIPES / "llama.py", *FLAGS]
    command += ["--max_steps", job.steps, "--output_dir", folder / OUTPUT]
    if job.in_background:
        command.append("--async_save")
    return command + data_of(tiny)


def seconds_of(ranks: list[dict[str, Any]], saves: int) -> dict[str, float]:
    """Return medians over the saves and steps of the rank that took longest.

    Args:
        ranks: what saving_rank.py wrote.
        saves: how many of each rank's to count.
    """
    return {
        "held_up_seconds": slowest(ranks, "held_up", saves),
        "until_whole_seconds": slowest(ranks, "until_whole", saves),
        "step_beside_seconds": slowest(ranks, "beside"),
        "step_seconds": slowest(ranks, "apart"),
        "training_seconds": max(rank["training"] for rank in ranks),
    }


def slowest(ranks: list[dict[str, Any]], name: str, first: int | None = None) -> float:
    """Return the largest median of the ranks, of the `first` numbers of each; 0 without any."""
    medians = []
    for rank in ranks:
        if rank[name]:
            medians.append(statistics.median(rank[name][:first]))
    return max(medians, default=0.0)
