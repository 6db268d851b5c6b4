# SPDX-License-Identifier: Apache-2.0
"""The job on which every strategy must agree: its tiny models, its launch, and how runs compare.

The job has rows of different lengths, accumulation, gradient clipping that takes effect, warm-up
and cosine decay, and weight decay. Its 20 steps are more than one epoch, so that one window of
accumulation has fewer rows.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from filelock import FileLock

import net
from jobs import RECIPES, SAME_AS, flags_of, wide
from launching import CONFIGS
from net import data_of
from planner_jobs import content_of

ROOT = Path(__file__).resolve().parents[1]

# Meshes divide the heads by 2 or 4, and ranks that share a row know no windows
FOR_MESHES = "--num_attention_heads 4".split()
# 210 rows do not divide by the global batch of 12, or by the 16 of meshes: the last window of an
# epoch has 6 rows, or 2, and some ranks have none of them.
JOB = [
    *"--max_steps 20 --num_train_epochs 2".split(),
    *"--learning_rate 1e-3 --warmup_steps 0.1 --lr_scheduler_type cosine".split(),
    *"--weight_decay 0.1 --max_grad_norm 0.5 --save_steps 0".split(),
]
WEIGHTS = {
    "full": [],
    "LoRA": ["--use_peft"],
    "int8 LoRA": ["--use_peft", "--load_in_8bit"],
    "nf4 LoRA": ["--use_peft", "--load_in_4bit", "--bnb_4bit_use_double_quant"],
}
# As net.CUT, of 16 rows, by the groups of ranks that have rows of their own under a mesh: 12 rows
# are not two equal batches for each of 4 groups, and too few for 8.
MESH_CUT = {1: (8, 2), 2: (4, 2), 4: (2, 2), 8: (1, 2)}

# Nothing is downloaded, and each rank has one thread, since the ranks share the machine's cores.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
# Softmax is invariant to a bias of the keys. Its gradient is rounding noise, which AdamW scales up
# to whole steps.
NO_GRADIENT = ("key.bias", "k_proj.bias")


@dataclass(frozen=True)
class Run:
    """One launch of the job."""

    group: str  # its table
    config: str  # name of a YAML of accelerate_configs/, without suffix
    ranks: int = 1
    batch: int = 3  # rows per device and micro-batch
    accumulation: int = 4
    weights: str = "full"  # a key of WEIGHTS
    flags: tuple[str, ...] = ()
    recipe: str = "llama"
    precision: str = "no"  # --mixed_precision
    sizes: tuple[str, ...] = ()  # those of the mesh that are not the YAML's, as in "tp_size=4"
    layers: int = 2  # in its tiny model

    @property
    def model(self) -> str:
        """The recipe whose tiny model and rows it has, and with which it is compared."""
        return SAME_AS.get(self.recipe, self.recipe)

    @property
    def maker(self) -> list[str]:
        """The arguments of make_tiny.py for its tiny model and rows."""
        words = [self.model, *wide(self.model)]
        if self.group == "meshes":
            words += ["--num_hidden_layers", str(self.layers), *FOR_MESHES]
            if self.model == "mistral_pretrain":
                words.append("--full_attention")
        return words

    @property
    def name(self) -> str:
        """The name of its output folder, different for every run."""
        cut = f"{self.ranks}x{self.batch}x{self.accumulation}"
        words = [self.recipe, self.weights.replace(" ", "_"), self.config, cut]
        if self.precision != "no":
            words.append(self.precision)
        words += [flag.removeprefix("--") for flag in self.flags]
        if self.group == "meshes":
            words += ["mesh", *self.sizes, f"{self.layers}_layers"]
        return "-".join(words)

    @property
    def arguments(self) -> list[str | int]:
        """The recipe's arguments, without those that name model, rows and output folder."""
        arguments = [*JOB, *flags_of(self.recipe)]
        arguments += ["--per_device_train_batch_size", self.batch]
        arguments += ["--gradient_accumulation_steps", self.accumulation]
        if self.weights != "full":
            arguments += RECIPES[self.model].adapters.split()
        return [*arguments, *WEIGHTS[self.weights], *self.flags]


def make_model(folder: Path, words: list[str]) -> Path:
    """Write a tiny model and its rows to `folder`/model and `folder`/data, once; return `folder`.

    Args:
        words: arguments of make_tiny.py, the maker first, as in Run.maker.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not (folder / "data").exists():
            net.make(words[0], folder, words[1:])
    return folder


def rehearsal(
    config: str, ranks: int, sizes: tuple[str, ...] = (), folder: Path | None = None
) -> list[str | int | Path]:
    """Return the first words of a command that runs a script on CPU ranks under a shipped YAML.

    With sizes of its mesh that are not its own, it is written beside a folder.
    """
    path = CONFIGS / f"{config}.yaml"
    if sizes and folder:
        path = folder.with_name(f"{folder.name}.yaml")
        content = content_of(config, sizes) | {"num_processes": ranks}
        path.write_text(yaml.safe_dump(content))
    command = [sys.executable, ROOT / "scripts" / "rehearse.py", "--device", "cpu"]
    return [*command, "--num_processes", ranks, "--config_file", path]


def launch(run: Run, tiny: Path, folder: Path) -> tuple[int, str]:
    """Run the recipe into `folder`, with the shard report in report.json, as a user rehearses it.

    Args:
        tiny: the folder with its model and rows.

    Returns:
        Exit code, and what was printed.
    """
    command = rehearsal(run.config, run.ranks, run.sizes, folder)
    command += ["--report", folder / "report.json", "--mixed_precision", run.precision]
    command += [
        ROOT / "recipes" / f"{run.recipe}.py",
        *run.arguments,
        *data_of(tiny),
        "--output_dir",
        folder,
    ]
    return output_of(command)


def output_of(command: list, **variables: str) -> tuple[int, str]:
    """Run a command; return its exit code, and what it printed to both streams."""
    done = net.run(
        *command, env=os.environ | ENVIRONMENT | variables, timeout=None, errors="replace"
    )
    return done.returncode, done.output


# ---- Finished runs ----


def read_steps(folder: Path) -> list[dict]:
    """Return the lines of metrics.jsonl that are about a training step."""
    return [line for line in net.metrics(folder) if "loss" in line]


def read_weights(folder: Path) -> dict[str, np.ndarray]:
    """Return the exported tensors by name, in float64, without those that have no gradient."""
    from safetensors.torch import load_file  # takes a second

    weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if not name.endswith(NO_GRADIENT):
                # torch converts: DeepSpeed exports in bf16, which numpy does not support.
                weights[name] = tensor.double().numpy()
    return weights


def relative(ours: Any, theirs: Any) -> float:
    """||ours - theirs|| / ||theirs|| (Frobenius), 0 if they are equal, else NaN where one is."""
    if np.array_equal(ours, theirs):
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def compare(folder: Path, reference: Path) -> Mapping[str, float | None]:
    """Return the largest relative differences between two finished runs over steps and tensors.

    None stands for a number that one of them does not report.

    Raises:
        ValueError: if they have different steps or different tensors.
    """
    steps = list(zip(read_steps(folder), read_steps(reference), strict=True))
    found = {}
    for key in ("loss", "grad_norm", "learning_rate"):
        pairs = [(ours[key], theirs[key]) for ours, theirs in steps]
        if any(None in pair for pair in pairs):
            found[key] = None
        else:
            # The maximum of numpy is NaN where one of them is
            found[key] = float(np.max([relative(a, b) for a, b in pairs]))
    ours = read_weights(folder)
    theirs = read_weights(reference)
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError(f"{folder} and {reference} hold different tensors")
    found["weights"] = float(np.max([relative(ours[name], theirs[name]) for name in ours]))
    return found
