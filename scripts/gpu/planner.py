"""The planner's constants from measured runs: fitted on every second one, their error published on
the others.

The planner counts tensors. What a process takes besides, CUDA's context and what the allocator
rounds up, are constants of scripts/memory_cards.py that were assumed from public reports. Here runs
of several sizes, batches and options are measured, and

    reserved = tensors x (1 + rounding)        process = reserved + context
are fitted by the medians of one half; the error of the whole prediction is that of the other half.
"""

import json
import statistics
import sys
from dataclasses import dataclass

import benchmark

from . import machine, speed
from .cell import ROOT, Outcome, Skip

STEPS, WARMUP = 4, 2
UNDER_BOUND, MEAN_BOUND = (
    0.03,
    0.10,
)  # a plan below what is taken ends in out of memory; above it a card stays empty
LEAST_RUNS = 4  # half of which are fitted


@dataclass(frozen=True)
class Point:
    """One run to measure: a model of scripts/benchmark.py and flags of recipes/llama.py."""

    model: str
    rows: int
    length: int
    flags: tuple = ()


CHECKPOINTED, LORA = ("--gradient_checkpointing",), ("--use_peft", "--dtype", "bfloat16")
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


def planned_tensors(setup, words, data, point, length):
    """Bytes of tensors that the planner's closed form expects at the peak."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import llama
    from memory_plan import Batch, Plan, closed_form
    from transformers import AutoConfig

    sys.argv = ["llama.py", *words]
    args = llama.parse_args()
    rows = [
        json.loads(line) for line in (data / "tokens.jsonl").read_text().splitlines()[: point.rows]
    ]
    learnt = sum(label != -100 for row in rows for label in row["labels"][1:])
    precision = "bf16" if setup.device == "cuda" else "no"
    plan = Plan(args, mixed_precision=precision)
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    return sum(closed_form(plan, config, Batch(point.rows, length, learnt))[0].values())


def measure_points(name_of_points):
    """A cell that measures points one after another and stores bytes planned and taken."""

    def run(setup):
        points = globals()[name_of_points]

        outcome = Outcome(ok=None)
        for point in points if not setup.tiny else points[:2]:
            sizes = {"per_device_train_batch_size": point.rows, "max_length": point.length}
            flags, data = speed.model_and_rows(setup, point.model, sizes)
            own = {} if setup.tiny else sizes
            words = as_flags(point.flags if not setup.tiny else ())
            name = f"{point.model} {point.rows} x {point.length} {' '.join(point.flags)}".strip()
            before = (machine.gpu_memory_used() or 0) * 2**20
            found, command = speed.probed(
                setup, name, "recipes/llama.py", flags | own | words, STEPS, WARMUP
            )
            row = {"run": name, "result": found.get("failed", "trained")}
            if "failed" not in found:
                every = {"eval_strategy": "no"} | flags | own | words
                length = every["max_length"]
                text = [str(word) for word in benchmark.as_words(every)]
                small = (
                    point
                    if not setup.tiny
                    else Point(point.model, every["per_device_train_batch_size"], length)
                )
                row["planned tensors"] = planned_tensors(setup, text, data, small, length)
                row |= {
                    kind: found[kind]
                    for kind in ("allocated", "active", "reserved")
                    if kind in found
                }
                if "device" in found:
                    row["process"] = found["device"] - before
            outcome.rows.append(row)
            outcome.commands.append(command)
            setup.keep(outcome)
        return outcome

    return run


def as_flags(words):
    """Words of a command line as a dictionary, True for a flag without a value."""
    flags, name = {}, None
    for word in words:
        if word.startswith("--"):
            name = word.removeprefix("--")
            flags[name] = True
        else:
            flags[name] = word
    return flags


def fit(rows):
    """(rounding, context in bytes): medians over runs of reserved / planned - 1 and of process -
    reserved.
    """
    rounding = statistics.median(row["reserved"] / row["planned tensors"] - 1 for row in rows)
    context = statistics.median(row["process"] - row["reserved"] for row in rows)
    return rounding, context


def predict(row, rounding, context):
    """Bytes that a process is expected to take."""
    return row["planned tensors"] * (1 + rounding) + context


def constants(setup):
    """Fit the constants on every second measured run and predict the others."""
    runs = []
    for cell in ("planner.small", "planner.large"):
        path = setup.output / f"{cell}.json"
        if path.exists():
            runs += [row for row in json.loads(path.read_text())["rows"] if "process" in row]
    if len(runs) < LEAST_RUNS:
        raise Skip(
            f"{len(runs)} measured runs; planner.small and planner.large measure them, on a GPU"
        )
    return judge(runs)


def judge(runs):
    """The outcome of a fit on runs[0::2], judged on runs[1::2]."""
    fitted, held_out = runs[0::2], runs[1::2]
    rounding, context = fit(fitted)
    errors = [predict(row, rounding, context) / row["process"] - 1 for row in held_out]
    tensors = [row["planned tensors"] / row["allocated"] - 1 for row in runs]
    rows = [
        {"what": "runs fitted", "value": len(fitted)},
        {"what": "runs held out", "value": len(held_out)},
        {"what": "rounding, fitted", "value": round(rounding, 4)},
        {"what": "context, GiB, fitted", "value": round(context / 2**30, 3)},
        {
            "what": "mean error of the process, held out",
            "value": round(statistics.mean(map(abs, errors)), 4),
        },
        {"what": "furthest above, held out", "value": round(max(errors), 4)},
        {"what": "furthest below, held out", "value": round(min(errors), 4)},
        {
            "what": "mean error of tensors, all",
            "value": round(statistics.mean(map(abs, tensors)), 4),
        },
        {"what": "furthest above of tensors, all", "value": round(max(tensors), 4)},
        {"what": "furthest below of tensors, all", "value": round(min(tensors), 4)},
    ]
    ok = min(errors) >= -UNDER_BOUND and statistics.mean(map(abs, errors)) <= MEAN_BOUND
    return Outcome(rows, ok)
