# SPDX-License-Identifier: Apache-2.0
"""How much host memory each rank takes to load a model, to resume, and to save, under every YAML.

    pytest evidence/test_memory.py --all -n 1     # one at a time: memory is sampled

Each launch is a rehearsal in whose ranks memory_probe.py measures. A model is loaded from files in
bf16, as on the hub, with the default --dtype float32, so that the weights cannot stay a mapping of
the file; what loading and resuming take is told in sizes of the model in fp32. To save, a rank may
take its share of what is saved and the largest tensor beside it; rank 0 the whole result.
"""

import json

import pytest
from safetensors import safe_open

from job import ROOT, make_model, output_of, rehearsal
from net import data_of
from planner_jobs import Mesh
from test_parity import EXPERTS, MESHES, configs, ranks_of

SHAPE = {
    "hidden_size": 768,  # the largest tensor has 24 MB: what a rank gathers stands out
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 8000,
    "num_train_rows": 40,
}
MAKERS = {
    "bf16": ["llama", "--num_hidden_layers", "5", "--dtype", "bfloat16"],
    "llama": ["llama", "--num_hidden_layers", "6"],
    "mixtral": ["mixtral", "--num_hidden_layers", "4", "--num_local_experts", "4"],
}
BYTES = {"bf16": 2, "fp32": 4}
# glibc maps allocations above this size, and returns them to the system when they are freed. By
# default it raises the bound to up to 32 MiB. The tensors of this model are smaller than that,
# unlike most of a real model, so that memory which ZeRO-3 frees while loading would still count.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
SHORT = ("fsdp2_full_shard-2", "deepspeed_zero2")
FLAGS = "--save_steps 1 --eval_strategy no --max_length 64 --allow_change max_steps".split()


@pytest.fixture(scope="session")
def tiny(once):
    """A function from a key of MAKERS to the folder of its model and rows."""

    def fill(folder):
        sizes = [word for name, size in SHAPE.items() for word in (f"--{name}", str(size))]
        for name, (maker, *words) in MAKERS.items():
            narrow = ["--intermediate_size", "512"] if name == "mixtral" else []
            make_model(folder / name, [maker, *sizes, *narrow, *words])

    return lambda name: once("memory", fill) / name


def launch(mesh, own, folder, *words):
    """Rehearse a recipe into `folder`; return what each rank measured, by what it did."""
    found = folder.with_name(f"{folder.name}_{len(list(folder.parent.glob('*')))}")
    found.mkdir()
    command = [*rehearsal(mesh.config, mesh.ranks), ROOT / "recipes" / mesh.recipe]
    command += [*data_of(own)[:4], *FLAGS, *mesh.words, *words, "--output_dir", folder]
    probe = f"{ROOT / 'evidence' / 'memory_probe.py'}:{found}"
    code, output = output_of(command, REHEARSAL_PROBE=probe, **MALLOC)
    assert code == 0, output[-3000:]
    return [json.loads((found / str(rank)).read_text()) for rank in range(mesh.ranks)]


# ---- Loading and resuming ----


# Each YAML with two ranks and, where it is allowed, four
LOADS = [(name, ranks_of(name, wanted)) for wanted in (2, 4) for name in configs()]


@pytest.mark.parametrize(("config", "ranks"), dict.fromkeys(LOADS))
def test_load(config, ranks, tiny, tmp_path, record):
    own = tiny("bf16")
    size = (own / "model" / "model.safetensors").stat().st_size / BYTES["bf16"] * BYTES["fp32"]
    words = ("--per_device_train_batch_size", 1)
    mesh = Mesh(config, ranks)
    first = launch(mesh, own, tmp_path / "run", *words, "--max_steps", 1)
    again = launch(mesh, own, tmp_path / "run", *words, "--max_steps", 2)

    def copies(measured, phase):
        return [round(rank[phase] / size, 3) for rank in measured]

    row = {"loading": copies(first, "loading"), "resuming": copies(again, "resuming")}
    record(config=config, ranks=ranks, **row)
    # The model itself and some buffers; resuming has AdamW's two tensors for each weight too
    assert max(row["loading"]) < 1.3 and max(row["resuming"]) < 3.3, row


# ---- Saving ----


def saves():
    """Return each YAML on about four ranks."""
    shared = {}
    for config, ranks, sizes in MESHES:
        if not sizes:
            shared.setdefault(config, Mesh(config, ranks))
    found = [Mesh(name, ranks_of(name, 4)) for name in configs()] + list(shared.values())
    found += [Mesh(config, 4, ep=2) for config in dict.fromkeys(name for name, *_ in EXPERTS)]
    return [*found, Mesh("pp", 4, pp=2)]


def facts_of(kind, grown, files):
    """Return the bytes by which ranks grew at most, those of their shares, and the largest tensor.

    Args:
        files: of the owners, in the order of their ranks; every rank owns tensors.
    """
    shares, largest = [0] * len(grown), 0
    for rank, file in enumerate(sorted(files)):
        with safe_open(file, "pt") as opened:
            sizes = [opened.get_tensor(name).nbytes for name in opened.keys()]
        shares[rank] = sum(sizes)
        largest = max(largest, *sizes)
    return {
        "grown": [rank[kind] for rank in grown],
        "shares": shares,
        "largest": largest,
    }


@pytest.mark.parametrize("mesh", saves(), ids=lambda mesh: mesh.config)
def test_save(mesh, tiny, tmp_path, record):
    own = tiny("mixtral" if mesh.ep > 1 else "llama")
    # A pipeline needs as many rows as it has stages
    words = ("--max_steps", 1, "--per_device_train_batch_size", 2)
    folder = tmp_path / "run"
    grown = launch(mesh, own, folder, *words)
    row = {
        "checkpoint": facts_of("checkpoint", grown, folder.glob("checkpoint-1/state*.safetensors")),
        "folder": facts_of("folder", grown, folder.glob("model*.safetensors")),
    }
    record(config=mesh.config, ranks=mesh.ranks, **row)
    for kind, saved in row.items():
        for size, share in zip(saved["grown"], saved["shares"], strict=True):
            assert size <= share + saved["largest"], (kind, row)
