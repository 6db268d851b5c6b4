# SPDX-License-Identifier: Apache-2.0
"""How much host memory each rank takes to load a model and to resume, in copies of the model.

Each launch is a rehearsal of recipes/llama.py on a model whose files are in bf16, as on the hub,
loaded with the default --dtype float32, so that the weights cannot stay a mapping of the file. In
every rank host_probe.py measures.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measured.rehearsals import Mesh, config_names, make_model, rehearse, versions, words_of
from proof.results import read_rows

Row = dict[str, Any]

SHAPE = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 8000,
}
BYTES_IN_BF16 = 2  # bytes per parameter
BYTES_IN_FP32 = 4
# Flags of the recipe: a checkpoint after each step, and more steps in the second launch
FLAGS = {
    "save_steps": 1,
    "eval_strategy": "no",
    "max_length": 64,
    "per_device_train_batch_size": 1,
    "allow_change": "max_steps",
}
# glibc maps allocations above this size, and returns them to the system when they are freed. By
# default it raises the bound to up to 32 MiB. The tensors of this model are smaller than that,
# unlike most of a real model, so that memory which ZeRO-3 frees while loading would still count.
MALLOC_THRESHOLD = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}


def make_model_and_rows(folder: Path) -> int:
    """Write a model in bf16, and short rows; return its number of parameters."""
    make_model(folder, SHAPE, "--dtype", "bfloat16", "--num_train_rows", "40")
    size = (folder / "model" / "model.safetensors").stat().st_size
    return size // BYTES_IN_BF16


def measure(
    config: str, ranks: int, tiny: Path, parameters: int, folder: Path, resumes: bool
) -> Row:
    """Return one row of the table: copies of the model that each rank took.

    Args:
        config: name of the YAML.
        ranks: number of processes.
        tiny: of `make_model_and_rows`.
        parameters: of the model.
        folder: for the runs.
        resumes: whether to measure a second launch, which resumes.
    """

    def copies(growths: list[dict], phase: str, kind: str) -> list[float]:
        grown = [growth[phase][kind] for growth in growths]
        return [round(size / (BYTES_IN_FP32 * parameters), 3) for size in grown]

    name = f"{config}_{ranks}"
    flags = FLAGS | {
        "model_name_or_path": tiny / "model",
        "dataset_name": tiny / "data" / "train.jsonl",
        "output_dir": folder / name,
    }
    first = launch(config, ranks, flags | {"max_steps": 1}, folder / f"{name}_first")
    row: Row = {"config": config, "ranks": ranks}
    row["loading"] = copies(first, "loading", "private")
    row["resident"] = copies(first, "loading", "resident")
    if resumes:
        again = launch(config, ranks, flags | {"max_steps": 2}, folder / f"{name}_again")
        row["resuming"] = copies(again, "resuming", "private")
    return row


def launch(config: str, ranks: int, flags: Mapping[str, Any], folder: Path) -> list[dict]:
    """Rehearse with flags of the recipe; return what the ranks measured.

    Raises RuntimeError if the run failed.
    """
    return rehearse(
        Mesh(config, ranks),
        words_of(flags),
        variable="REHEARSAL_HOST_MEMORY",
        folder=folder,
        environment=MALLOC_THRESHOLD,
    )


def place_of(row: Row) -> tuple[int, int]:
    """Return where the row of a launch belongs in the table: by its YAML, then by its ranks."""
    return config_names().index(row["config"]), row["ranks"]


def write_table(path: Path, parameters: int, row: Row) -> None:
    """Write a row in place of that of the same launch, as JSON, one a line.

    The other rows stay, but for those that other versions of the libraries measured.
    """
    by_launch = {}
    for kept in (*read_rows(path), row):
        by_launch[place_of(kept)] = kept
    rows = [by_launch[place] for place in sorted(by_launch)]
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'{{"versions": {json.dumps(versions())}, "parameters": {parameters}, "rows": [\n'
    path.write_text(f"{head}{lines}\n]}}\n")
