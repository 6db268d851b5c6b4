# SPDX-License-Identifier: Apache-2.0
"""Command lines of runs, and the environment that they see."""

import os
import sys
from pathlib import Path
from typing import Any

from .cells import Cell, Contestant, Flags, Settings, slug
from .recipe import RECIPE

PEERS = "evidence/benchmark_peers.py"
PROBE = "evidence/benchmark_probe.py"
# Variables of a run on a CPU: no GPU is used, and torch computes with one thread
ON_A_CPU = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
PRECISION = {"cpu": "no", "cuda": "bf16"}  # mixed precision of all contestants, by device


def as_words(flags: Flags) -> list[Any]:
    """Return flags as words of a command line; True means a flag without a value."""
    words = []
    for name, value in flags.items():
        words.append(f"--{name}")
        if value is not True:
            words.append(value)
    return words


def command_of(
    cell: Cell, contestant: Contestant, data: Path, folder: Path, settings: Settings
) -> list[str]:
    """Return the command line of one run into `folder`, from the repository's root.

    data: what `prepare` returns.
    """
    warmup = settings.warmup_of(cell)
    steps = settings.steps_of(cell)
    command: list[Any] = [sys.executable]
    if contestant.ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node", contestant.ranks]
    command += [PROBE, folder / "probe.json", "--warmup", warmup, "--steps", steps]

    flags = cell.flags_of(contestant)
    if steps:
        flags = flags | {"max_steps": steps}
    model = settings.model_folder(cell.model_of(contestant)) / "model"
    flags = flags | {"model_name_or_path": model, "output_dir": folder / "run"}
    if contestant.tool == "ours":
        command += [RECIPE, *as_words(flags | recipe_flags(data))]
    else:
        command += [PEERS, contestant.tool]
        if cell.kind != "shipped":
            command.append("--matched")
        command += as_words(flags | peer_flags(cell, data))
    return [str(word) for word in command]


def recipe_flags(data: Path) -> Flags:
    """Return the flags of the recipe that depend on no cell: no evaluation, no checkpoints."""
    return {
        "dataset_name": data / "rows.jsonl",
        "eval_strategy": "no",
        "save_steps": 0,
        "report_to": "none",
    }


def peer_flags(cell: Cell, data: Path) -> Flags:
    """Return the flags of the other tools in addition to those of the cell."""
    flags: Flags = {"data": data, "mixed_precision": PRECISION[cell.device]}
    if cell.device == "cuda":
        flags["skip_save"] = True  # gigabytes that would never be read
    return flags


def environment(
    cell: Cell, contestant: Contestant, folder: Path, settings: Settings
) -> dict[str, str]:
    """Return the environment of a run: no hub, one thread, and its own cache of datasets."""
    cache = settings.output_dir / "cache" / slug(contestant.tool)
    if cell.cache == "cold":
        cache = folder / "cache"
    variables = reading_variables(cache)
    variables["ACCELERATE_MIXED_PRECISION"] = PRECISION[cell.device]  # instead of a YAML
    if cell.device == "cpu":
        variables |= ON_A_CPU
    return os.environ | variables


def reading_variables(cache: Path) -> dict[str, str]:
    """Return the variables of a process that reads rows: no hub, one thread, and this cache."""
    return {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(cache.resolve()),
    }
