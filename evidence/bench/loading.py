# SPDX-License-Identifier: Apache-2.0
"""The host memory of all ranks of a host while they load a model, under each shipped YAML."""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter, sub
from pathlib import Path
from typing import Any

from measured.rehearsals import Mesh, make_model, rehearse, words_of

Row = dict[str, Any]

RANKS = 8
SAMPLE_SECONDS = 0.02
BYTES_IN_BF16 = 2
BYTES_IN_FP32 = 4
GIB = 2**30
# The shape of Llama 3.2 1B, with a smaller vocabulary
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
}
# A mixture of experts with as many parameters
MIXTURE = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "vocab_size": 32_000,
}
LAYERS = (16, 8, 4, 2)  # the model's, and those that are tried where it does not fit
MAKING = ("--dtype", "bfloat16", "--tie_word_embeddings", "--num_train_rows", "40")
FLAGS = {
    "max_steps": 1,
    "eval_strategy": "no",
    "max_length": 64,
    "per_device_train_batch_size": RANKS,  # so that a pipeline has a micro-batch for each stage
    "save_steps": 0,
}


@dataclass(frozen=True)
class Cell:
    """A launch.

    Attributes:
        mesh: the YAML and its ranks.
        copies: about how many copies of the model all ranks have between them at most, those on
            their devices included.
    """

    mesh: Mesh
    copies: float


def cells() -> list[Cell]:
    """Return a launch with 8 ranks, or one for single.yaml, of every shipped YAML."""
    replicas = ["ddp", "deepspeed_zero0", "deepspeed_zero1", "deepspeed_zero2"]
    replicas += ["deepspeed_zero2_offload", "fsdp1_no_shard"]
    sharded = ["fsdp2_full_shard", "fsdp2_shard_grad_op", "fsdp2_cpu_offload"]
    sharded += ["deepspeed_zero3", "deepspeed_zero3_offload"]
    found = [Cell(Mesh("single", 1), 1.1)]
    found += [Cell(Mesh(name, RANKS), RANKS + 1) for name in replicas]
    found += [Cell(Mesh(name, RANKS), 2.7) for name in sharded]
    found += [Cell(Mesh(name, RANKS), 3.2) for name in ("fsdp1_full_shard", "fsdp1_shard_grad_op")]
    found.append(Cell(Mesh("fsdp1_hybrid_shard", RANKS), 4.2))
    found.append(Cell(Mesh("fsdp2_hybrid_shard", RANKS, ("dp_shard_size=4",)), 3.7))
    return [*found, *cells_of_meshes()]


def cells_of_meshes() -> list[Cell]:
    """Return the launches in which ranks share rows, experts or a pipeline."""
    found = [Cell(Mesh("hsdp_cp", RANKS), 3.7), Cell(Mesh("hsdp_tp", RANKS), 5)]
    for name, copies in (("fsdp2_cp", 2.7), ("deepspeed_ulysses", 2.7), ("fsdp2_tp", 5)):
        found.append(Cell(Mesh(name, RANKS, ("dp_shard_size=4",)), copies))
    found.append(Cell(Mesh("tp", RANKS, ("tp_size=8",)), 2))
    found += [Cell(Mesh(name, RANKS, ep=RANKS), 2.7) for name in ("ep", "fsdp2_ep")]
    found.append(Cell(Mesh("pp", RANKS, pp=RANKS), 2))
    return found


def shape_of(cell: Cell, memory: float) -> dict[str, int]:
    """Return the shape of the largest model of which a launch fits into memory.

    Args:
        memory: bytes for the weights.
    """
    shape = SHAPE if cell.mesh.ep == 1 else MIXTURE
    fitting = dict(shape)
    for layers in LAYERS:
        fitting["num_hidden_layers"] = layers
        if cell.copies * BYTES_IN_FP32 * parameters_of(fitting) <= memory:
            break
    return fitting


def parameters_of(shape: Mapping[str, int]) -> int:
    """Return about how many parameters a model has: those of its matrices."""
    hidden = shape["hidden_size"]
    key_value = hidden * shape["num_key_value_heads"] // shape["num_attention_heads"]
    attention = 2 * hidden * (hidden + key_value)
    experts = shape.get("num_local_experts", 1)
    feed_forward = 3 * hidden * shape["intermediate_size"] * experts
    layers = shape["num_hidden_layers"] * (attention + feed_forward)
    return layers + shape["vocab_size"] * hidden


def make(shape: Mapping[str, int], folder: Path) -> int:
    """Write a model in bf16 and short rows, unless they are there; return its parameters."""
    weights = folder / "model" / "model.safetensors"
    kind = "mixtral" if "num_local_experts" in shape else "llama"
    if not weights.is_file():
        make_model(folder, shape, *MAKING, kind=kind)
    return weights.stat().st_size // BYTES_IN_BF16


# ---- Samples of the memory of all ranks ----
@dataclass(frozen=True)
class Sample:
    """What all ranks had of one kind of memory at one time.

    Attributes:
        time: seconds of the machine's monotonic clock.
        sizes: bytes by rank.
    """

    time: float
    sizes: Sequence[int]


class Sampler:
    """Reads the memory of all ranks again and again, from when they have begun."""

    def __init__(self, read: Callable[[int], int], folder: Path, ranks: int) -> None:
        """Start to read.

        Args:
            read: returns the bytes of a process; an OSError says that it has ended.
            folder: into which each rank writes a file with its process id.
        """
        self.samples: list[Sample] = []
        self._read = read
        self._folder = folder
        self._ranks = ranks
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> list[Sample]:
        """Stop, and return the samples."""
        self._running = False
        self._thread.join()
        return self.samples

    def _run(self) -> None:
        pids: list[int] = []
        while self._running:
            if len(pids) < self._ranks:
                pids = pids_in(self._folder)
            else:
                self._take(pids)
            time.sleep(SAMPLE_SECONDS)

    def _take(self, pids: Sequence[int]) -> None:
        """Add a sample, unless a rank has ended."""
        start = time.monotonic()
        try:
            sizes = [self._read(pid) for pid in pids]
        except OSError:
            return
        self.samples.append(Sample((start + time.monotonic()) / 2, sizes))


def pids_in(folder: Path) -> list[int]:
    """Return the process ids of the ranks that have begun, in their order."""
    found = [json.loads(path.read_text()) for path in folder.glob("loading.*")]
    return [rank["pid"] for rank in sorted(found, key=itemgetter("rank"))]


def private_memory(pid: int) -> int:
    """Return the bytes of a process in pages that belong to no file, and so only to it."""
    return size_in(Path(f"/proc/{pid}/status").read_text(), "RssAnon")


def mapped_files(pid: int) -> int:
    """Return the bytes of a process in pages of files: one that k processes map counts 1/k."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return size_in(text, "Pss_File") + size_in(text, "Pss_Shmem")


def size_in(text: str, name: str) -> int:
    """Return the bytes of a line such as "RssAnon:  12 kB" of a file in /proc.

    Raises:
        OSError: there is no such line, since the process has ended.
    """
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise OSError(f"no {name}: the process has ended")
    return int(found[1]) * 1024


# ---- Copies of the model ----
def measure(cell: Cell, tiny: Path, parameters: int, folder: Path) -> Row:
    """Launch a cell, and return its row of the table.

    Args:
        tiny: the model and rows of `make`.
        parameters: of the model.
        folder: a new folder.

    Raises:
        RuntimeError: the launch failed, with the end of what it printed.
    """
    flags = FLAGS | {
        "model_name_or_path": tiny / "model",
        "dataset_name": tiny / "data" / "train.jsonl",
        "output_dir": folder.with_name(f"{folder.name}_run"),
    }
    words = [*words_of(flags), *cell.mesh.words]
    private = Sampler(private_memory, folder, cell.mesh.ranks)
    mapped = Sampler(mapped_files, folder, cell.mesh.ranks)
    try:
        ranks = rehearse(cell.mesh, words, variable="REHEARSAL_LOADING", folder=folder)
    finally:
        samples = {"private": private.end(), "mapped": mapped.end()}
    copies = copies_of(ranks, samples, BYTES_IN_FP32 * parameters)
    place = {"config": cell.mesh.config, "ranks": cell.mesh.ranks, "parameters": parameters}
    return place | copies


def copies_of(
    ranks: Sequence[Mapping[str, Any]], samples: Mapping[str, Sequence[Sample]], size: int
) -> Row:
    """Return what the ranks had of the model, in copies of it.

    All is beyond what a rank had before loading:
        held: the weights that all ranks hold at the end.
        private: the most private memory of all ranks together.
        mapped: the most pages of files of all ranks together.
        beyond_rank_0, beyond_others: the most private memory of rank 0, and of any other rank, that
            was not for the weights that it holds.

    Args:
        ranks: what each rank says of itself, as loading_probe.py writes it, in their order.
        samples: of all ranks, by kind: "private" and "mapped".
        size: bytes of a copy in fp32.

    Raises:
        RuntimeError: there is no sample before the ranks began, or after.
    """
    begin = min(rank["times"]["begin"] for rank in ranks)
    end = min(max(rank["times"].values()) for rank in ranks)
    private = growth(samples["private"], begin, end)
    mapped = growth(samples["mapped"], begin, end)
    beyond = []
    for number, rank in enumerate(ranks):
        used = [sample.sizes[number] - on_device(rank, sample.time) for sample in private]
        beyond.append(max(used))
    found = {
        "held": sum(on_device(rank, end) for rank in ranks),
        "private": max(sum(sample.sizes) for sample in private),
        "mapped": max(sum(sample.sizes) for sample in mapped),
        "beyond_rank_0": beyond[0],
        "beyond_others": max(beyond[1:], default=0),
    }
    copies: Row = {name: round(number / size, 3) for name, number in found.items()}
    copies["samples"] = [len(private), len(mapped)]
    copies["seconds"] = round(end - begin, 1)
    return copies


def growth(samples: Sequence[Sample], begin: float, end: float) -> list[Sample]:
    """Return the samples of a time, less the last sample before it.

    Raises:
        RuntimeError: there is none before or none in it.
    """
    before = [sample for sample in samples if sample.time < begin]
    during = [sample for sample in samples if begin <= sample.time <= end]
    if not before or not during:
        raise RuntimeError("the ranks were too fast for a sample of their memory")
    grown = []
    for sample in during:
        grown.append(Sample(sample.time, list(map(sub, sample.sizes, before[-1].sizes))))
    return grown


def on_device(rank: Mapping[str, Any], time: float) -> int:
    """Return the bytes of weights that are on a rank's device at a time, on a machine with GPUs.

    What passes through the host is there from `prepare` on, and all else as soon as it is loaded.
    """
    if not rank["on_host"]:
        return rank["held"]["loaded"]
    return rank["held"]["prepared"] if time > rank["times"]["loaded"] else 0
