"""The planner's constants, fitted on one half of measured runs and judged on the other.

The planner counts tensors. What a process takes besides, CUDA's context and what the allocator
rounds up, are constants of scripts/planner/cards.py that were assumed from public reports. Here runs
of several sizes, batches and options are measured, and

    reserved = tensors x (1 + rounding)
    process = reserved + context

are fitted by the medians of every second run. The error that is published is that of the whole
prediction on the other runs.
"""

import json
import statistics
from dataclasses import dataclass

import benchmark

from . import machine, speed
from .cell import Outcome, Skip

STEPS = 4
WARMUP = 2  # of the steps
UNDER_BOUND = 0.03  # relative: a run that takes more than its plan can end out of memory
MEAN_BOUND = 0.10  # relative: a plan above what is taken leaves a part of the card empty
LEAST_RUNS = 4  # half of which are fitted


@dataclass(frozen=True)
class Point:
    """One run to measure: a model of scripts/benchmark.py and flags of recipes/llama.py."""

    model: str
    rows: int
    length: int
    flags: tuple = ()


CHECKPOINTED = ("--gradient_checkpointing",)
LORA = ("--use_peft", "--dtype", "bfloat16")
QLORA = (*LORA, "--load_in_4bit", "--bnb_4bit_use_double_quant")
# Interleaved, so that both halves have every kind
SMALL_POINTS = (
    Point("1B", 1, 1024),
    Point("1B", 2, 1024),
    Point("1B", 4, 1024, CHECKPOINTED),
    Point("1B", 2, 4096, CHECKPOINTED),
    Point("1B", 1, 4096, LORA),
    Point("1B", 4, 2048, LORA),
    Point("1B", 2, 2048, QLORA),
    Point("1B", 1, 4096, (*QLORA, *CHECKPOINTED)),
)
LARGE_POINTS = (
    Point("8B", 1, 1024, LORA),
    Point("8B", 2, 2048, (*LORA, *CHECKPOINTED)),
    Point("8B", 2, 2048, (*QLORA, *CHECKPOINTED)),
    Point("8B", 1, 1024, QLORA),
    Point("8B", 1, 4096, (*LORA, *CHECKPOINTED)),
    Point("8B", 4, 1024, (*QLORA, *CHECKPOINTED)),
)


def planned_tensors(setup, flags, data):
    """Return the bytes of tensors that the planner's closed form expects at the peak.

    flags: of recipes/llama.py, as a dictionary. data: folder of the tokenized rows.
    """
    from planner.closed_form import closed_form
    from planner.plan import Plan
    from planner.recipe import parse_words
    from planner.request import Batch
    from transformers import AutoConfig

    args = parse_words([str(word) for word in benchmark.as_words(flags)])
    plan = Plan(args, mixed_precision="bf16" if setup.device == "cuda" else "no")
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    rows = flags["per_device_train_batch_size"]
    batch = Batch(rows, flags["max_length"], learnt_tokens(data, rows))
    tensors, *_ = closed_form(plan, config, batch)
    return sum(tensors.values())


def learnt_tokens(data, number):
    """Return how many tokens of the first rows have a label; the first of a row is never learnt."""
    lines = (data / "tokens.jsonl").read_text().splitlines()
    learnt = 0
    for line in lines[:number]:
        labels = json.loads(line)["labels"][1:]
        learnt += sum(label != -100 for label in labels)
    return learnt


def measure_points(name_of_points):
    """Return a cell that measures points one after another and stores bytes planned and taken.

    name_of_points: of a constant of this module, so that a table of cells can name it.
    """

    def run(setup):
        points = globals()[name_of_points]
        if setup.tiny:
            points = points[:2]
        outcome = Outcome(ok=None)
        for point in points:
            row, command = measure_point(setup, point)
            outcome.rows.append(row)
            outcome.commands.append(command)
            setup.keep(outcome)
        return outcome

    return run


def measure_point(setup, point):
    """Return (row of one run, its command line); the row has no bytes where the run failed."""
    sizes = {"per_device_train_batch_size": point.rows, "max_length": point.length}
    flags, data = speed.model_and_rows(setup, point.model, sizes)
    if not setup.tiny:  # tiny runs keep the shape that they come with
        flags = flags | sizes | as_flags(point.flags)
    name = f"{point.model} {point.rows} x {point.length}"
    name = " ".join([name, *point.flags])
    used_mib = machine.gpu_memory_used() or 0
    found, command = speed.probed(setup, name, "recipes/llama.py", flags, STEPS, WARMUP)
    row = {"run": name, "result": found.get("failed", "trained")}
    if "failed" in found:
        return row, command
    row["planned tensors"] = planned_tensors(setup, {"eval_strategy": "no"} | flags, data)
    for kind in ("allocated", "active", "reserved"):
        if kind in found:
            row[kind] = found[kind]
    if "device" in found:
        row["process"] = found["device"] - used_mib * 2**20
    return row, command


def as_flags(words):
    """Return the words of a command line as a dictionary, True for a flag without a value."""
    flags = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            flags[name] = True
        else:
            flags[name] = word
    return flags


def fit(rows):
    """Return (rounding, context in bytes), each the median over runs."""
    roundings = [row["reserved"] / row["planned tensors"] - 1 for row in rows]
    contexts = [row["process"] - row["reserved"] for row in rows]
    return statistics.median(roundings), statistics.median(contexts)


def predict(row, rounding, context):
    """Return the bytes that a process is expected to take."""
    return row["planned tensors"] * (1 + rounding) + context


def constants(setup):
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


def judge(runs):
    """Return the outcome of a fit on runs[0::2], judged on runs[1::2]."""
    fitted = runs[0::2]
    held_out = runs[1::2]
    rounding, context = fit(fitted)
    errors = [predict(row, rounding, context) / row["process"] - 1 for row in held_out]
    tensor_errors = [row["planned tensors"] / row["allocated"] - 1 for row in runs]
    mean_error = statistics.mean(map(abs, errors))
    mean_tensor_error = statistics.mean(map(abs, tensor_errors))
    values = {
        "runs fitted": len(fitted),
        "runs held out": len(held_out),
        "rounding, fitted": round(rounding, 4),
        "context, GiB, fitted": round(context / 2**30, 3),
        "mean error of the process, held out": round(mean_error, 4),
        "furthest above, held out": round(max(errors), 4),
        "furthest below, held out": round(min(errors), 4),
        "mean error of tensors, all": round(mean_tensor_error, 4),
        "furthest above of tensors, all": round(max(tensor_errors), 4),
        "furthest below of tensors, all": round(min(tensor_errors), 4),
    }
    rows = [{"what": name, "value": value} for name, value in values.items()]
    return Outcome(rows, min(errors) >= -UNDER_BOUND and mean_error <= MEAN_BOUND)
