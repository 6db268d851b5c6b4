# SPDX-License-Identifier: Apache-2.0
"""Launch a run of the job on CPU ranks, as a user would rehearse it."""

import os
import subprocess
import sys
from pathlib import Path

import yaml

from paths import ROOT
from proof.jobs import Run, content_of

# Nothing is downloaded, and each rank has one thread, since the ranks share the machine's cores.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


def make_model(folder: Path, words: list[str]) -> None:
    """Write a tiny model and its rows to `folder`/model and `folder`/data.

    Args:
        words: arguments of make_tiny.py, the maker first, as in Run.maker.
    """
    maker, *shape = words
    command = [sys.executable, str(ROOT / "scripts" / "make_tiny.py"), maker, str(folder), *shape]
    subprocess.run(command, check=True, capture_output=True)


def data_of(tiny: Path) -> list[str | Path]:
    """Return the arguments that name a tiny model and its rows, in files or folders of images."""
    arguments = ["--model_name_or_path", tiny / "model"]
    for flag, split in (("--dataset_name", "train"), ("--eval_dataset_name", "test")):
        rows = tiny / "data" / f"{split}.jsonl"
        arguments += [flag, rows if rows.exists() else rows.with_suffix("")]
    return arguments


def rehearsal(config: str, ranks: int, root: Path = ROOT) -> list[str | int | Path]:
    """Return the first words of a command that runs a script on CPU ranks under a shipped YAML.

    Args:
        root: the checkout whose script and YAML are used.
    """
    command = [sys.executable, root / "scripts" / "rehearse.py", "--device", "cpu"]
    command += ["--num_processes", ranks]
    return [*command, "--config_file", root / "accelerate_configs" / f"{config}.yaml"]


def launch(run: Run, tiny: Path, folder: Path, root: Path = ROOT) -> tuple[int, str]:
    """Run the recipe into `folder`, with the shard report in report.json.

    Args:
        tiny: the folder with its model and rows.
        root: the checkout whose recipe, YAML and scripts are launched.

    Returns:
        Exit code, and what was printed.
    """
    command = [*rehearsal(run.config, run.ranks, root), "--report", folder / "report.json"]
    if run.sizes:
        command += ["--config_file", write_with_sizes(run, folder)]
    command += ["--mixed_precision", run.precision]
    command += [root / "recipes" / f"{run.recipe}.py", *run.arguments]
    command += [*data_of(tiny), "--output_dir", folder]
    done = subprocess.run(
        [str(word) for word in command],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def write_with_sizes(run: Run, folder: Path) -> Path:
    """Write the YAML with the run's sizes of the mesh beside its folder, and return its path."""
    content = content_of(run.config, run.sizes) | {"num_processes": run.ranks}
    path = folder.with_name(f"{folder.name}.yaml")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path
