# SPDX-License-Identifier: Apache-2.0
"""Rehearsals that measure memory: recipes/llama.py on CPU ranks, with a hook in each rank.

The planner's measurements reach the other packages of scripts/ only through this module.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paths import CONFIGS, RECIPES, SCRIPTS
from proof import jobs, results

OUTPUT_SHOWN = 3000  # characters of a launch that failed
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def config_names() -> list[str]:
    """Return the names of the shipped YAML files, links left out."""
    return jobs.configs()


def ranks_of(config: str, wanted: int) -> int:
    """Return the number of ranks closest to the wanted one that a YAML allows."""
    return jobs.ranks_of(config, wanted)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine memory."""
    return results.versions()


def make_model(folder: Path, shape: Mapping[str, int], *flags: str) -> None:
    """Write a tiny model of a shape, and rows for it, into a folder."""
    command = [sys.executable, str(SCRIPTS / "make_tiny.py"), "llama", str(folder)]
    command += [*flags, *words_of(shape)]
    subprocess.run(command, check=True, capture_output=True)


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return {name: value} of flags as the words of a command line."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return words


def rehearse(
    config: str,
    ranks: int,
    words: Sequence[str],
    variable: str,
    folder: Path,
    precision: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run the recipe under accelerate_configs/`config`.yaml; return what each rank measured.

    Args:
        config: name of the YAML.
        ranks: number of processes.
        words: of the recipe's command line.
        variable: environment variable that makes each rank write one JSON file into `folder`.
        folder: a new folder.
        precision: mixed precision instead of the YAML's.
        environment: further variables.

    Raises RuntimeError with the end of the output if the run failed or a rank measured nothing.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, SCRIPTS / "rehearse.py", "--num_processes", ranks]
    if precision is not None:
        command += ["--mixed_precision", precision]
    command += ["--config_file", CONFIGS / f"{config}.yaml", RECIPES / "llama.py", *words]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **QUIET, **(environment or {}), variable: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    measured = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    if done.returncode or len(measured) != ranks:
        raise RuntimeError(done.stdout[-OUTPUT_SHOWN:])
    return measured
