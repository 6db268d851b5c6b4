# SPDX-License-Identifier: Apache-2.0
"""What each rank of a large run does at its start that is this project's own work, simulated.

A rank is a number here: it gets a stand-in for its Accelerator, and computes what it would compute
in a run. Nothing of it waits for other ranks.
"""

import json
import resource
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pyarrow
import torch
from accelerate import DistributedType
from transformers import AutoConfig, AutoModelForCausalLM

from components.arguments import SamplingArguments
from components.batches import BatchPlan
from components.int_column import IntColumn
from components.lines import Line
from components.owners import share_out, spread_ranks
from components.shuffling import NEWEST
from measured.validation import SHAPES
from paths import CONFIGS, SCRIPTS

Row = dict[str, Any]

BATCH = 8  # rows of a rank's batch
ROWS_PER_CHUNK = 25_000  # about what components/rows.py writes into a chunk of its cache
LONGEST = 4096
STRATEGIES = ("sequential", "random", "group_by_length")
FURTHER_BATCHES = 1_000  # over which the time of a batch is averaged
SORTING_RANKS = 16  # that are simulated where a rank sorts many rows; else all are
# The tensors of AdamW's state for each weight, in fp32 as the weight is, and its step count
STATES = ("exp_avg", "exp_avg_sq")
BYTES_IN_FP32 = 4
SEED = 42


# ---- The deal of rows ----
class RowsWithLengths:
    """Rows of which only the lengths are there, drawn at random as in bench/planning.py."""

    def __init__(self, number: int) -> None:
        """number: of rows."""
        chance = np.random.default_rng(0)
        drawn = chance.lognormal(np.log(245), 1, number).clip(1, LONGEST).astype(np.int64)
        chunks = [drawn[first : first + ROWS_PER_CHUNK] for first in chunk_starts(number)]
        self.lengths = IntColumn(pyarrow.chunked_array(chunks))
        # A loader gives its collator only numbers, so that nothing else of the rows is read.
        self.dataset = SimpleNamespace(select_columns=lambda names: None)

    def __len__(self) -> int:
        return len(self.lengths)


def chunk_starts(number: int) -> range:
    """Return the number of the first row of each chunk."""
    return range(0, number, ROWS_PER_CHUNK)


class NumbersOfRows:
    """A collator whose batches are only the numbers of their rows."""

    columns: ClassVar[list[str]] = []

    def __call__(self, source: Any, lines: Sequence[Line]) -> dict[str, Any]:
        return {"row": [row for line in lines for row in line]}


def stand_in(rank: int, ranks: int) -> Any:
    """Return what a rank asks its Accelerator for when it plans its batches."""
    return SimpleNamespace(
        distributed_type=DistributedType.NO,
        process_index=rank,
        num_processes=ranks,
        parallelism_config=None,
        non_blocking=False,
        device=torch.device("cpu"),
    )


def batches_of(rank: int, ranks: int, rows: Any, strategy: str) -> Iterator[list[int]]:
    """Return a rank's batches of an epoch, as the recipes' loaders make them.

    Args:
        rows: RowsWithLengths.
    """
    args: Any = SamplingArguments()
    for name, value in plan_arguments(strategy).items():
        setattr(args, name, value)
    plan = BatchPlan(args, stand_in(rank, ranks), len(rows), lengths=rows.lengths)
    loader = plan.training_loader(rows, NumbersOfRows(), first_step=0, order=NEWEST)
    for batch in loader:
        yield batch["row"]


def plan_arguments(strategy: str) -> dict[str, Any]:
    """Return the arguments that a plan of batches reads."""
    return {
        "train_sampling_strategy": strategy,
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
        "num_train_epochs": 1,
        "eval_strategy": "no",
        "seed": SEED,
    }


def measure_deal(ranks: int, rows: RowsWithLengths, strategy: str) -> Row:
    """Return what it takes the ranks of a run to make their batches, in CPU time.

    Raises:
        ValueError: two ranks got the same row.
    """
    simulated = spread_ranks(SORTING_RANKS if strategy == "group_by_length" else ranks, ranks)
    first_seconds = []
    first_rows: list[int] = []
    for rank in simulated:
        start = time.process_time()
        batches = batches_of(rank, ranks, rows, strategy)
        first_rows += next(batches)
        first_seconds.append(time.process_time() - start)
    twice = len(first_rows) - len(set(first_rows))
    if twice:
        raise ValueError(f"{strategy}: {twice} rows went to two of {ranks} ranks in one step")
    batches = batches_of(ranks - 1, ranks, rows, strategy)
    next(batches)
    start = time.process_time()
    further = list(islice(batches, FURTHER_BATCHES))
    seconds = time.process_time() - start
    return {
        "strategy": strategy,
        "ranks": ranks,
        "rows": len(rows),
        "simulated": len(simulated),
        "first_ms": round(1000 * max(first_seconds), 3),
        "further_ms": round(1000 * seconds / len(further), 3),
        "peak_bytes": peak_of_deal(ranks - 1, ranks, rows, strategy),
    }


def peak_of_deal(rank: int, ranks: int, rows: RowsWithLengths, strategy: str) -> int:
    """Return the bytes that a rank needs at most to make its first batches."""
    tracemalloc.start()
    for _ in islice(batches_of(rank, ranks, rows, strategy), FURTHER_BATCHES // 10):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


# ---- The owners of a checkpoint ----
def config_of(model: str) -> Any:
    """Return the config of a Llama; `model` is a key of SHAPES."""
    return AutoConfig.for_model("llama", **SHAPES[model])


def tensors_of_state(model: str) -> dict[str, int]:
    """Return the bytes of each tensor of the training state of a Llama, by its name.

    Args:
        model: a key of SHAPES.
    """
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config_of(model))
    sizes = {}
    for name, weight in whole.named_parameters():
        sizes[name] = BYTES_IN_FP32 * weight.numel()
        for state in STATES:
            sizes[f"state.{name}.{state}"] = BYTES_IN_FP32 * weight.numel()
        sizes[f"state.{name}.step"] = BYTES_IN_FP32
    return sizes


def measure_owners(model: str, sizes: Mapping[str, int], ranks: int) -> Row:
    """Return how the training state is shared out, and how long that takes each rank."""
    start = time.process_time()
    owners = share_out(sizes, ranks)
    seconds = time.process_time() - start
    shares = [0] * ranks
    for name, owner in owners.items():
        shares[owner] += sizes[name]
    return {
        "model": model,
        "ranks": ranks,
        "tensors": len(sizes),
        "whole": sum(sizes.values()),
        "largest_tensor": max(sizes.values()),
        "largest_share": max(shares),
        "smallest_share": min(shares),
        "ms": round(1000 * seconds, 1),
    }


# ---- The planner ----
def measure_planner(model: str, ranks: int, folder: Path) -> Row:
    """Return the planner's answer for a full fine-tuning under FSDP2, and its CPU seconds.

    Raises:
        RuntimeError: the planner failed, with what it printed.
    """
    config = folder / f"{model}.json"
    config_of(model).to_json_file(config, use_diff=False)
    plan = folder / "plan.json"
    command = [sys.executable, SCRIPTS / "plan_memory.py", config, "--num_processes", ranks]
    command += ["--config_file", CONFIGS / "fsdp2_full_shard.yaml", "--json", plan]
    command += ["--max_length", LONGEST, "--per_device_train_batch_size", 1]
    command += ["--gradient_checkpointing"]
    before = children_seconds()
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    seconds = children_seconds() - before
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    peak = json.loads(plan.read_text())["peak"]
    return {"model": model, "ranks": ranks, "peak": peak, "seconds": round(seconds, 2)}


def children_seconds() -> float:
    """Return the CPU seconds of the processes that this one started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
