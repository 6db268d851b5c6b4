# SPDX-License-Identifier: Apache-2.0
"""Runs of recipes/llama.py: the shipped recipe under a shipped YAML, in processes of its own."""

import json
import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from job import ENVIRONMENT, rehearsal
from paths import RECIPES

from .catalog import NUM_ROWS

STEPS = 4  # each is of all rows
# A line that names an exception, behind the rank where torchrun prints it
RAISED = re.compile(r"(\[rank\d+\]: ?)?[\w.]*(Error|Exception)\b")
OF_LAUNCHER = "ChildFailedError"  # says that a rank failed, and not why
ERROR = "error: "  # start of the line in which a recipe says why it does not run


@dataclass(frozen=True)
class Kind:
    """A way to train a family.

    Attributes:
        config: name of the YAML.
        ranks: number of processes.
        words: further arguments of the recipe.
    """

    config: str
    ranks: int
    words: tuple[str, ...]

    @property
    def uses_adapters(self) -> bool:
        return "--use_peft" in self.words


KINDS = {
    "full": Kind("single", 1, ("--learning_rate", "1e-3")),
    "LoRA": Kind("single", 1, ("--use_peft", "--learning_rate", "1e-2")),
    "FSDP": Kind("fsdp", 2, ("--learning_rate", "1e-3")),
}


@dataclass(frozen=True)
class Finished:
    """What a run that has finished says of itself.

    Attributes:
        attention: that the model computes with, which transformers chose.
        losses: of each step, before its update.
        trained: the loss after the last step, of the same rows.
    """

    attention: str
    losses: list[float]
    trained: float


class RunFailedError(Exception):
    """A run that did not end well; the message is its reason in one line."""


def launch(kind: Kind, model: Path, rows: Path, folder: Path, *, warm: bool) -> Finished:
    """Train a model on the rows into a folder, and evaluate it on the same rows after each step.

    No flag chooses the attention, the layers that get adapters, or what FSDP wraps.

    Args:
        warm: start from processes that have already imported the libraries.

    Raises RunFailedError if the recipe refuses the model, or ends in any other way.
    """
    command = rehearsal(kind.config, kind.ranks)
    if warm:
        command.insert(2, "--warm")  # after python and the script
    rows_of_rank = NUM_ROWS // kind.ranks
    command += [RECIPES / "llama.py", "--model_name_or_path", model, "--output_dir", folder]
    command += ["--dataset_name", rows, "--eval_dataset_name", rows, "--max_steps", STEPS]
    command += ["--per_device_train_batch_size", rows_of_rank]
    command += ["--per_device_eval_batch_size", rows_of_rank, *kind.words]
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RunFailedError(reason_of(done.returncode, done.stdout))
    return read_run(done.stdout, folder)


def read_run(output: str, folder: Path) -> Finished:
    """Return what a run printed in its summary, and its losses.

    Raises RunFailedError if its summary or its last evaluation is missing.
    """
    attention = re.search(r"kernels: attention (\S+)", output)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    losses = [line["loss"] for line in metrics if "loss" in line]
    evaluations = [line["eval_loss"] for line in metrics if "eval_loss" in line]
    if attention is None or len(losses) != STEPS or len(evaluations) != STEPS:
        raise RunFailedError(f"the run has {len(losses)} steps, {len(evaluations)} evaluations")
    return Finished(attention[1].rstrip(","), losses, evaluations[-1])


def reason_of(code: int, output: str) -> str:
    """Return why a run failed: what the recipe says, or the last error in its output."""
    lines = output.splitlines()
    said = [line.removeprefix(ERROR) for line in lines if line.startswith(ERROR)]
    raised = [line for line in lines if RAISED.match(line) and OF_LAUNCHER not in line]
    found = said[:1] or raised[-1:] or lines[-1:]
    return f"exit code {code}: {' '.join(found)}"
