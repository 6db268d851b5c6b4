# SPDX-License-Identifier: Apache-2.0
"""The planner's constants, fitted to one half of measured runs and judged on the other.

The planner counts tensors. What a process takes in addition, CUDA's context and what the allocator
rounds up, are constants in planner/cards.py, assumed from public reports. Here runs of several
sizes, batches and options are measured, and

    reserved = tensors x (1 + rounding)
    process = reserved + context

are fitted by the medians of every second run. The published error is that of the whole prediction
on the other runs.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine, recipe
from bench.cells import Flags
from bench.commands import as_words

from . import probed
from .cell import Outcome, Row, Setup, Skip
from .launches import as_flags
from .probed import Probed, model_and_rows

STEPS = 4
WARMUP = 2  # steps that are not measured
UNDER_BOUND = 0.03  # relative: a run that takes more than its plan can end out of memory
MEAN_BOUND = 0.10  # relative: a plan above what is taken leaves a part of the card empty
LEAST_RUNS = 4  # half of them are fitted
PEAKS = ("allocated", "active", "reserved")


@dataclass(frozen=True)
class Point:
    """One run to measure: a model of the benchmark and flags of recipes/llama.py."""

    model: str
    rows: int
    length: int
    flags: tuple[str, ...] = ()

    @property
    def sizes(self) -> Flags:
        """The flags of its batch."""
        return {"per_device_train_batch_size": self.rows, "max_length": self.length}

    @property
    def name(self) -> str:
        """Its name in a table."""
        return " ".join([f"{self.model} {self.rows} x {self.length}", *self.flags])


@dataclass(frozen=True)
class Constants:
    """What a process takes in addition to its tensors."""

    rounding: float  # what the allocator adds, as a share of the tensors
    context: float  # bytes of CUDA's context

    def predict(self, row: Row) -> float:
        """Return the bytes that the process of a run is expected to take."""
        return row["planned tensors"] * (1 + self.rounding) + self.context


CHECKPOINTED = ("--gradient_checkpointing",)
LORA = ("--use_peft", "--dtype", "bfloat16")
QLORA = (*LORA, "--load_in_4bit", "--bnb_4bit_use_double_quant")
LORA_CHECKPOINTED = (*LORA, *CHECKPOINTED)
QLORA_CHECKPOINTED = (*QLORA, *CHECKPOINTED)
# Interleaved, so that both halves have every kind
SMALL_POINTS = (
    Point("1B", 1, 1024),
    Point("1B", 2, 1024),
    Point("1B", 4, 1024, CHECKPOINTED),
    Point("1B", 2, 4096, CHECKPOINTED),
    Point("1B", 1, 4096, LORA),
    Point("1B", 4, 2048, LORA),
    Point("1B", 2, 2048, QLORA),
    Point("1B", 1, 4096, QLORA_CHECKPOINTED),
)
LARGE_POINTS = (
    Point("8B", 1, 1024, LORA),
    Point("8B", 2, 2048, LORA_CHECKPOINTED),
    Point("8B", 2, 2048, QLORA_CHECKPOINTED),
    Point("8B", 1, 1024, QLORA),
    Point("8B", 1, 4096, LORA_CHECKPOINTED),
    Point("8B", 4, 1024, QLORA_CHECKPOINTED),
)


# ---- Measuring ----


def small(setup: Setup) -> Outcome:
    """Measure 1B runs."""
    return measure_points(setup, SMALL_POINTS)


def large(setup: Setup) -> Outcome:
    """Measure 8B runs."""
    return measure_points(setup, LARGE_POINTS)


def measure_points(setup: Setup, points: Sequence[Point]) -> Outcome:
    """Measure points one after another: bytes planned and taken; with --tiny the first two."""
    if setup.tiny:
        points = points[:2]
    outcome = Outcome(ok=None)
    for point in points:
        measure_point(setup, point, outcome)
        setup.keep(outcome)
    return outcome


def measure_point(setup: Setup, point: Point, outcome: Outcome) -> None:
    """Add the row of one run; it has no bytes if the run failed."""
    prepared = model_and_rows(setup, point.model, point.sizes)
    flags = prepared.flags
    if not setup.tiny:  # Tiny runs keep their own shape.
        flags = flags | point.sizes | as_flags(point.flags)
    used_mib = machine.gpu_memory_used() or 0
    reading = probed.run(setup, Probed(point.name, flags, steps=STEPS, warmup=WARMUP))
    row: Row = {"run": point.name, "result": reading.result}
    if not reading.failed:
        flags = {"eval_strategy": "no"} | flags
        rows = int(flags["per_device_train_batch_size"])
        supervised = supervised_tokens(prepared.data, rows)
        row["planned tensors"] = planned_tensors(setup, flags, supervised)
        for kind in PEAKS:
            if kind in reading.peaks:
                row[kind] = reading.peaks[kind]
        if "device" in reading.peaks and not setup.shares_gpu:
            row["process"] = reading.peaks["device"] - used_mib * 2**20
    outcome.rows.append(row)
    outcome.commands.append(reading.command)


def planned_tensors(setup: Setup, flags: Flags, supervised: int) -> int:
    """Return the bytes of tensors that the planner's closed form expects at the peak.

    flags: of recipes/llama.py. supervised: tokens of a batch that need logits.
    """
    from transformers import AutoConfig

    from planner.closed_form import closed_form
    from planner.plan import Plan
    from planner.request import Batch

    args = recipe.parse_words([str(word) for word in as_words(flags)])
    if setup.on_gpu:
        args = with_pieces_of_gpu(args)
    plan = Plan(args, mixed_precision="bf16" if setup.on_gpu else "no")
    config = AutoConfig.from_pretrained(args.model_name_or_path, trust_remote_code=False)
    batch = Batch(flags["per_device_train_batch_size"], flags["max_length"], supervised)
    tensors = closed_form(plan, config, batch)[0]
    return sum(tensors.values())


def with_pieces_of_gpu(args: Any) -> Any:
    """Return the arguments of a recipe with the pieces of the loss that it computes on this GPU.

    torch is not asked for the GPU's memory, since a context of this process would take some of it.
    """
    from planner.recipe import logits_mib_on, with_values

    if args.max_logits_mib is not None:
        return args
    memory = machine.gpu_facts()["memory_mib"] * 2**20
    return with_values(args, max_logits_mib=logits_mib_on(memory))


def supervised_tokens(data: Path, number: int) -> int:
    """Return the supervised tokens of the first rows; the first token of a row is never one."""
    lines = (data / "tokens.jsonl").read_text().splitlines()
    supervised = 0
    for line in lines[:number]:
        labels = json.loads(line)["labels"][1:]
        supervised += len([label for label in labels if label != -100])
    return supervised


# ---- Fitting ----


def constants(setup: Setup) -> Outcome:
    """Fit the constants on every second measured run and predict the others."""
    runs = []
    for cell in ("planner.small", "planner.large"):
        path = setup.output / f"{cell}.json"
        if path.exists():
            rows = json.loads(path.read_text())["rows"]
            runs += [row for row in rows if "process" in row]
    if len(runs) < LEAST_RUNS:
        raise Skip(
            f"{len(runs)} measured runs; planner.small and planner.large measure them, on a GPU"
        )
    return judge(runs)


def fit(rows: Sequence[Row]) -> Constants:
    """Return the constants, each the median over runs."""
    roundings = [row["reserved"] / row["planned tensors"] - 1 for row in rows]
    contexts = [row["process"] - row["reserved"] for row in rows]
    return Constants(statistics.median(roundings), statistics.median(contexts))


def judge(runs: Sequence[Row]) -> Outcome:
    """Return the outcome of a fit on runs[0::2], judged on runs[1::2]."""
    fitted = runs[0::2]
    held_out = runs[1::2]
    found = fit(fitted)
    errors = [found.predict(row) / row["process"] - 1 for row in held_out]
    of_tensors = [row["planned tensors"] / row["allocated"] - 1 for row in runs]
    mean_error = mean_size(errors)
    values = {
        "runs fitted": len(fitted),
        "runs held out": len(held_out),
        "rounding, fitted": round(found.rounding, 4),
        "context, GiB, fitted": round(found.context / 2**30, 3),
        "mean error of the process, held out": round(mean_error, 4),
        "furthest above, held out": round(max(errors), 4),
        "furthest below, held out": round(min(errors), 4),
    }
    values["mean error of tensors, all"] = round(mean_size(of_tensors), 4)
    values["furthest above of tensors, all"] = round(max(of_tensors), 4)
    values["furthest below of tensors, all"] = round(min(of_tensors), 4)
    rows = [{"what": name, "value": value} for name, value in values.items()]
    return Outcome(rows, min(errors) >= -UNDER_BOUND and mean_error <= MEAN_BOUND)


def mean_size(errors: Sequence[float]) -> float:
    """Return the mean of errors without their signs."""
    return statistics.mean(abs(error) for error in errors)
