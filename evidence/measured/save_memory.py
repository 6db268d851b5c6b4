# SPDX-License-Identifier: Apache-2.0
"""How much host memory each rank takes to save, beside its share and the largest tensor.

Each launch is a rehearsal of one step, in whose ranks save_probe.py measures.
"""

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import AutoConfig

from measured.host_memory import MALLOC_THRESHOLD
from measured.rehearsals import (
    Mesh,
    all_names,
    expert_names,
    make_model,
    meshes,
    pipeline_names,
    ranks_of,
    rehearse,
    versions,
    words_of,
)
from measured.validation import SHAPES, training_arguments
from planner.plan import Plan
from planner.saving import saving_of
from proof.results import read_rows

Row = dict[str, Any]
# The largest tensor has 24 MB, so that what a rank gathers stands out against what it keeps.
WIDTH = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 8000,
}
EXPERTS = {"num_local_experts": 4, "intermediate_size": 512, "num_hidden_layers": 4}
MOST_RANKS = 8  # that the smallest of some meshes needs
GROUP = 2  # ranks that have the experts of a layer, or the layers of a model, between them
RANKS_OF_HOST = 8  # on paper
ON_PAPER = [(shape, ranks) for shape in ("8B", "70B") for ranks in (8, 64, 512)]
FLAGS = {
    "max_steps": 1,
    "save_steps": 1,
    "eval_strategy": "no",
    "max_length": 64,
    "per_device_train_batch_size": 2,  # a pipeline needs as many rows as it has stages
}
IN_BACKGROUND = ("--async_save",)


def mesh_of(config: str, ranks: int) -> Mesh:
    """Return a shipped YAML on the number of ranks closest to `ranks` that it allows."""
    if config in expert_names():
        return Mesh(config, ranks, ep=GROUP)
    if config in pipeline_names():
        return Mesh(config, ranks, pp=GROUP)
    of_config = [mesh for mesh in meshes(MOST_RANKS) if mesh.config == config]
    if of_config:
        return min(of_config, key=lambda mesh: abs(mesh.ranks - ranks))
    return Mesh(config, ranks_of(config, ranks))


def make_models(folder: Path) -> None:
    """Write a Llama and a mixture of experts, each with rows of its own, into a folder."""
    rows = ("--num_train_rows", "40")
    make_model(folder / "llama", WIDTH, *rows)
    make_model(folder / "mixtral", WIDTH | EXPERTS, *rows, kind="mixtral")


def measure(mesh: Mesh, models: Path, folder: Path) -> Row:
    """Return what each rank took to write a checkpoint and the folder of `from_pretrained`.

    A second run writes its checkpoint in the background, from a copy that it makes of what is on
    the host already, too.

    Args:
        models: of `make_models`.
        folder: of the runs, one after the other; it is new, and is removed.

    Raises:
        RuntimeError: if a run failed.
    """
    waiting = measure_run(mesh, models, folder)
    in_background = measure_run(mesh, models, folder, IN_BACKGROUND)
    return {
        "config": mesh.config,
        "ranks": mesh.ranks,
        "checkpoint": waiting["checkpoint"],
        "background": in_background["checkpoint"],
        "folder": waiting["folder"],
    }


def measure_run(mesh: Mesh, models: Path, folder: Path, words: Sequence[str] = ()) -> Row:
    """Return what each rank of one run took to write the two, as {"checkpoint", "folder"}.

    Args:
        models: of `make_models`.
        folder: of the run; it is new, and is removed.
        words: further words of the recipe's command line.

    Raises:
        RuntimeError: if the run failed.
    """
    tiny = models / ("mixtral" if mesh.ep > 1 else "llama")
    output = folder / "run"
    flags = FLAGS | {
        "model_name_or_path": tiny / "model",
        "dataset_name": tiny / "data" / "train.jsonl",
        "output_dir": output,
    }
    grown = rehearse(
        mesh,
        [*words_of(flags), *mesh.words, *words],
        variable="REHEARSAL_SAVE_MEMORY",
        folder=folder / "measured",
        environment=MALLOC_THRESHOLD,
    )
    row: Row = {}
    for kind, files in (
        ("checkpoint", output.glob("checkpoint-1/state*.safetensors")),
        ("folder", output.glob("model*.safetensors")),
    ):
        row[kind] = facts_of([rank[kind] for rank in grown], sorted(files))
    shutil.rmtree(folder)
    return row


def facts_of(grown: Sequence[int], files: Iterable[Path]) -> Row:
    """Return the bytes by which ranks grew at most, those of their shares, and the largest tensor.

    Args:
        grown: of each rank.
        files: of the owners, in the order of their ranks; every rank owns tensors.
    """
    shares = [0] * len(grown)
    largest = 0
    for rank, file in enumerate(files):
        sizes = sizes_in(file)
        shares[rank] = sum(sizes)
        largest = max(largest, *sizes)
    return {"grown": list(grown), "shares": shares, "largest": largest}


def row_on_paper(shape: str, ranks: int) -> Row:
    """Return what ranks on hosts of eight keep to save a Llama of a shape, in fp32 with AdamW."""
    machines = ranks // RANKS_OF_HOST
    how = {"engine": "fsdp2", "ranks": ranks, "shards": ranks, "machines": machines}
    config = AutoConfig.for_model("llama", **SHAPES[shape])
    saving = saving_of(Plan(training_arguments([]), **how), config)
    return {"model": shape, "ranks": ranks, "most": saving.most, **asdict(saving)}


def sizes_in(file: Path) -> list[int]:
    """Return the bytes of each tensor of a safetensors file."""
    sizes = []
    with safe_open(file, "pt") as opened:
        for name in opened.keys():
            sizes.append(opened.get_tensor(name).nbytes)
    return sizes


def write_table(path: Path, row: Row, planned: Sequence[Row]) -> None:
    """Write what was worked out, and a measured row in place of that of the same YAML, as JSON.

    The other rows stay, but for those that other versions of the libraries measured.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    by_config = {kept["config"]: kept for kept in read_rows(path)} | {row["config"]: row}
    rows = [by_config[name] for name in all_names() if name in by_config]
    parts = [f'"versions": {json.dumps(versions())}']
    for name, found in (("planned", planned), ("rows", rows)):
        lines = ",\n".join(json.dumps(row) for row in found)
        parts.append(f'"{name}": [\n{lines}\n]')
    path.write_text("{" + ", ".join(parts) + "}\n")


def is_within(row: Row) -> bool:
    """Return whether no rank of a YAML took more than it may."""
    return all(is_kept(row[kind]) for kind in ("checkpoint", "background", "folder"))


def is_kept(saved: Row) -> bool:
    """Return whether no rank grew by more than its share and twice the largest tensor."""
    pairs = zip(saved["grown"], saved["shares"], strict=True)
    return all(grown <= share + 2 * saved["largest"] for grown, share in pairs)
