"""Cells that measure the recipe's speed and memory at real sizes.

Beside it run bare loops, Trainer and SFTTrainer.
"""

import json
import os
import pstats
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import benchmark
import benchmark_tables
from proof.launch import data_of

from . import launches, machine
from .cell import ROOT, Outcome, Skip

TOOLS = ("ours", "lean", "floor", "trainer", "trl")
LOSS_GATE = benchmark_tables.CURVE["bfloat16"]  # nats, of each step
LEAN = benchmark_tables.NAMES["lean"]
BARE_LOOPS = (LEAN, benchmark_tables.NAMES["floor"])
MOST_OVER_LEAN = 1.05  # a step of the recipe to one of the bare loop that computes the same
# Published for one Hopper GPU; see docs of each source for its settings, which the cells take over.
# NeMo AutoModel, Llama 3 8B LoRA, one H100, TransformerEngine and Triton:
NEMO_TOKENS = 12_473  # a second
NEMO_SHARE = 0.7  # of it, which the recipe must reach
# KempnerForge, 8B full, one H200:
KEMPNER_MFU = 0.578
LEAST_MFU = 0.45
# torchtune, Llama 3.1 8B QLoRA, two rows of 2,048 tokens, one RTX 4090:
TORCHTUNE_PEAK_GIB = 7.4
MOST_PEAK_GIB = 8.0
LORA = {"use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
NF4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
COMMON = benchmark.MATCHED | {"max_length": 4096, "weight_decay": 0.0}
# Seconds that a run takes at least; with the 8B model most of them read weights
RUN_TIME = 10
RUN_TIME_8B = 45


def settings(setup, warmup=3):
    """Return what scripts/benchmark.py's functions read of its command line.

    Rows are made, since no data is at hand.
    """
    return SimpleNamespace(
        output_dir=setup.models, data=setup.models / "no data", smoke=setup.tiny, warmup=warmup
    )


def contest(setup, name, model, flags, contestants, rows="long", steps=10):
    """Run contestants of scripts/benchmark.py one after another, with --tiny only the first two.

    Yields (label, what was measured) of each. One for which no time is left, or whose package is
    missing, says so. Weights are deleted after each run.
    """
    cell = benchmark.Cell(
        name, "growth", model, rows, contestants, COMMON | flags, steps, device=setup.device
    )
    if setup.tiny:
        first_two = dict(list(contestants.items())[:2])
        cell = benchmark.in_small(cell._replace(contestants=first_two))
    args = settings(setup)
    cell, left_out = benchmark.without_missing(cell)
    for label, reason in left_out.items():
        yield label, {"failed": f"left out: {reason}"}
    benchmark.make_models([model], args)
    seconds_needed = RUN_TIME_8B if model == "8B" and not setup.tiny else RUN_TIME
    runs = args.output_dir / "cells" / benchmark.slug(cell.name)
    for label, contestant in cell.contestants.items():
        if setup.seconds_left() < seconds_needed:
            yield label, {"failed": "no time left"}
            continue
        data = benchmark.prepare(cell, contestant, args)
        found = benchmark.run_once(cell, label, data, args)
        benchmark.delete_weights(runs / benchmark.slug(label))
        command = benchmark.command_of(cell, contestant, data, setup.models / "RUN", args)
        found["command"] = launches.printable(command, setup)
        yield label, found


def row_of(label, found, model, flags, device):
    """Return one line: speed, memory in GiB, and the share of the GPU's peak where it is known.

    found: what `contest` yields. device: the name of the GPU.
    """
    name = benchmark_tables.NAMES.get(label, label)
    if "failed" in found:
        return {"what": name, "result": found["failed"]}
    row = {
        "what": name,
        "result": "trained, beside another process" if found["loaded"] else "trained",
        "tokens/s": round(found.get("tokens_per_second", 0)),
        "ms a step": round(found.get("seconds_per_step", 0) * 1e3, 1),
    }
    for kind in ("allocated", "reserved"):
        if kind in found["memory_mib"]:
            row[f"{kind}, GiB"] = round(found["memory_mib"][kind] / 1024, 2)
    peak = peak_of(device)
    if peak and "tokens_per_second" in found:
        work = benchmark_tables.flops_per_token(
            benchmark.MODELS[model], flags["max_length"], flags.get("use_peft", False)
        )
        row["MFU"] = round(work * found["tokens_per_second"] / peak, 3)
    return row


def peak_of(device):
    """Return the peak of a GPU in operations a second, None if it is not known."""
    for card, peak in benchmark_tables.PEAK.items():
        if card in device:
            return peak
    return None


def device_name(setup):
    return machine.facts(setup.device)["device"]


def times_the_step(found, reference):
    """Return the step time of a run relative to another's, None where one of them has none."""
    if "seconds_per_step" not in found or "seconds_per_step" not in reference:
        return None
    return round(found["seconds_per_step"] / reference["seconds_per_step"], 3)


def side_by_side(model, flags, judge, name):
    """Return a cell that trains the same batches with the recipe and with the other TOOLS.

    judge: function of the recipe's row that says whether the published figure's bound holds, None
    if it has none here.
    """

    def run(setup):
        if machine.version_of("datasets") is None:
            raise Skip("not installed: datasets")
        contestants = {}
        for tool in TOOLS:
            contestants[tool] = benchmark.Contestant(tool, needs="trl" if tool == "trl" else "")
        outcome = Outcome()
        ours = {}
        device = device_name(setup)
        for label, found in contest(setup, name, model, flags, contestants):
            row = row_of(label, found, model, COMMON | flags, device)
            if label == "ours":
                ours = found
            if "losses" in found and "losses" in ours:
                row["loss differs by"] = most_apart(found["losses"], ours["losses"])
            times = times_the_step(found, ours)
            if times is not None:
                row["times the recipe's step"] = times
            outcome.rows.append(row)
            outcome.commands.append(found.get("command", ""))
            outcome.ok = verdict(outcome.rows, judge, setup)
            setup.keep(outcome)
        return outcome

    return run


def most_apart(losses, reference):
    """Return the largest difference of two runs' losses, in nats, over the steps of both."""
    pairs = zip(losses, reference, strict=False)
    return max(abs(loss - wanted) for loss, wanted in pairs)


def verdict(rows, judge, setup):
    """Return whether the recipe trained and is right, fast and small enough, None if unknown.

    It must agree with the bare loops, be about as fast as the one that computes the same, and be
    within the cell's own bound. rows: that of the recipe first.
    """
    ours = rows[0]
    if ours["result"] != "trained":
        return False
    loops = [row for row in rows if row["what"] in BARE_LOOPS and row["result"] == "trained"]
    if any(row["loss differs by"] > LOSS_GATE for row in loops):
        return False
    if setup.tiny:
        return None  # speeds of small shapes say nothing
    for row in loops:
        if row["what"] == LEAN and row["times the recipe's step"] < 1 / MOST_OVER_LEAN:
            return False
    return judge(ours)


def fast_enough_lora(ours):
    return ours["tokens/s"] >= NEMO_SHARE * NEMO_TOKENS


def fast_enough_full(ours):
    if "MFU" not in ours:
        return None
    return ours["MFU"] >= LEAST_MFU


def no_published_figure(ours):
    return True


def small_enough_qlora(ours):
    if "allocated, GiB" not in ours:
        return None
    return ours["allocated, GiB"] <= MOST_PEAK_GIB


eight_b_lora = side_by_side(
    "8B",
    LORA | {"per_device_train_batch_size": 2, "max_grad_norm": 0},
    fast_enough_lora,
    "proof 8B LoRA",
)
eight_b_full = side_by_side(
    "8B",
    benchmark.FULL_IN_BF16 | {"gradient_checkpointing": True, "per_device_train_batch_size": 4},
    fast_enough_full,
    "proof 8B full",
)
eight_b_qlora = side_by_side(
    "8B",
    LORA
    | NF4
    | {"gradient_checkpointing": True, "max_length": 2048, "per_device_train_batch_size": 2},
    small_enough_qlora,
    "proof 8B QLoRA",
)
one_b_full = side_by_side(
    "1B", {"per_device_train_batch_size": 4}, no_published_figure, "proof 1B full"
)


def make_eight_b(setup):
    """Draw the 8B model of the cells that follow on the GPU and write it once."""
    args = settings(setup)
    folder = args.output_dir / "models" / "8B"
    benchmark.make_models(["8B"], args)
    size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    return Outcome([{"bytes of weights": size}], size > 0)


# ---- Levers ----


def ladder(levers, model="8B", base=None, rows="long", name="ladder"):
    """Return a cell that adds levers to one job, each alone.

    levers: {name: (flags, package it needs)}. base: flags of the job.
    """

    def run(setup):
        flags = base or (LORA | {"per_device_train_batch_size": 2})
        contestants = {"as it is": benchmark.Contestant("ours")}
        for lever, (more, needs) in levers.items():
            contestants[lever] = benchmark.Contestant("ours", more, needs=needs)
        outcome = Outcome(ok=True)
        as_it_is = {}
        device = device_name(setup)
        for label, found in contest(setup, f"proof {name}", model, flags, contestants, rows):
            more, _ = levers.get(label, ({}, ""))
            row = row_of(label, found, model, COMMON | flags | more, device)
            if label == "as it is":
                as_it_is = found
            times = times_the_step(found, as_it_is)
            if times is not None:
                row["step, x as it is"] = times
            why = found.get("failed", "")
            broke = bool(why) and not why.startswith(("left out", "no time"))
            outcome.ok = outcome.ok and not broke
            outcome.rows.append(row)
            outcome.commands.append(found.get("command", ""))
            setup.keep(outcome)
        return outcome

    return run


LEVERS = {
    "loss in pieces of 4 GiB": ({"max_logits_mib": 4096}, ""),
    "loss in pieces of 256 MiB": ({"max_logits_mib": 256}, ""),
    "compiled": ({"torch_compile": True}, ""),
    "Liger": ({"use_liger_kernel": True}, "liger-kernel"),
    "a log line every 4 steps": ({"logging_steps": 4}, ""),
}
RAGGED_LEVERS = {
    "padding-free": ({"padding_free": True}, ""),
    "packed, SDPA": ({"packing": True}, ""),
    "packed, flex": ({"packing": True, "attn_implementation": "flex_attention"}, ""),
    "packed, varlen": ({"packing": True, "attn_implementation": "varlen"}, ""),
    "packed, flash": ({"packing": True, "attn_implementation": "flash_attention_2"}, "flash-attn"),
    "packed, compiled": ({"packing": True, "torch_compile": True}, ""),
}
LONG_LEVERS = {
    "flex": ({"attn_implementation": "flex_attention"}, ""),
    "varlen": ({"attn_implementation": "varlen"}, ""),
    "flash": ({"attn_implementation": "flash_attention_2"}, "flash-attn"),
}
ladder_of_lora = ladder(LEVERS, name="ladder")
ladder_of_ragged_rows = ladder(
    RAGGED_LEVERS,
    "1B",
    {"per_device_train_batch_size": 4, "max_length": 2048},
    "gsm8k",
    "ragged rows",
)
packed_16k = ladder(
    LONG_LEVERS,
    "1B",
    {"per_device_train_batch_size": 1, "max_length": 16384, "packing": True},
    "gsm8k",
    "packed 16k",
)


# ---- Runs under the probe ----


def probed(setup, name, script, flags, steps, warmup, config=None, **variables):
    """Run a recipe under scripts/benchmark_probe.py, with accelerate's launcher if a YAML is given.

    variables: of the environment. Returns seconds a step after the warm-up and the probe's peaks in
    bytes, or {"failed": why}; and the command line.
    """
    folder = setup.work / re.sub(r"\W+", "_", name)
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "probe.json"
    command = [sys.executable]
    if config:
        command += ["-m", "accelerate.commands.launch"]
        command += ["--config_file", f"accelerate_configs/{config}.yaml"]
        command += ["--main_process_port", "0"]
    command += ["scripts/benchmark_probe.py", report, "--warmup", warmup, "--steps", steps]
    common = {"max_steps": steps, "output_dir": folder / "run", "eval_strategy": "no"}
    command += [script, *benchmark.as_words({"save_steps": 0} | flags | common)]
    command = [str(word) for word in command]
    shown = launches.printable(command, setup)
    seconds = setup.seconds_left()
    if seconds < 5:
        return {"failed": "no time left"}, shown
    environment = environment_of(setup, launched=config is not None) | variables
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return {"failed": "no time left"}, shown
    (folder / "output.txt").write_text(done.stdout)
    if done.returncode:
        error = launches.error_of(done.stdout)
        return {"failed": f"exit code {done.returncode}: {error}"}, shown
    return read_probe(report, warmup), shown


def environment_of(setup, launched=False):
    """Return the environment of a recipe: bf16 on a GPU, unless accelerate's launcher sets it."""
    environment = dict(os.environ)
    if setup.device == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    elif not launched:
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    return environment


def read_probe(path, warmup):
    """Return the peaks in bytes that the probe wrote, and seconds a step after the warm-up."""
    probe = json.loads(path.read_text())
    found = dict(probe["memory"])
    ends = probe["ends"]  # of steps, in seconds
    timed = len(ends) - warmup
    if timed > 0:
        found["seconds_per_step"] = (ends[-1] - ends[warmup - 1]) / timed
    return found


def model_and_rows(setup, model, flags, rows="long"):
    """Return (flags that name a model of scripts/benchmark.py and its rows, the rows' folder)."""
    contestant = benchmark.Contestant("ours")
    cell = benchmark.Cell(
        "rows", "growth", model, rows, {"ours": contestant}, COMMON | flags, 12, device=setup.device
    )
    if setup.tiny:
        cell = benchmark.in_small(cell)
    args = settings(setup)
    benchmark.make_models([model], args)
    data = benchmark.prepare(cell, cell.contestants["ours"], args)
    folder = args.output_dir / "models" / benchmark.slug(model) / "model"
    return cell.flags | {"model_name_or_path": folder, "dataset_name": data / "rows.jsonl"}, data


def offload_threads(setup):
    """Offload with one thread and with as many as there are cores, for AdamW runs on the host."""
    cores = os.cpu_count() or 1
    flags, _ = model_and_rows(setup, "1B", {"per_device_train_batch_size": 1, "max_length": 1024})
    configs = ["fsdp2_cpu_offload"]
    if machine.version_of("deepspeed"):
        configs.append("deepspeed_zero2_offload")
    outcome = Outcome(ok=True)
    for config in configs:
        one_thread = None  # seconds a step
        for threads in (1, cores):
            name = f"{config} {threads}"
            variables = {"OMP_NUM_THREADS": str(threads)}
            found, command = probed(
                setup, name, "recipes/llama.py", flags, 5, 2, config, **variables
            )
            row = {"YAML": config, "threads": threads, "result": found.get("failed", "trained")}
            if "seconds_per_step" in found:
                seconds = found["seconds_per_step"]
                one_thread = one_thread or seconds
                row["seconds a step"] = round(seconds, 3)
                row["times faster"] = round(one_thread / seconds, 2)
            outcome.ok = outcome.ok and "failed" not in found
            outcome.commands.append(f"OMP_NUM_THREADS={threads} {command}")
            outcome.rows.append(row)
            setup.keep(outcome)
    return outcome


def fragmentation(setup):
    """Memory that the allocator holds above what tensors take, for rows of varying length."""
    sizes = {"per_device_train_batch_size": 4, "max_length": 2048}
    flags, _ = model_and_rows(setup, "1B", sizes, "gsm8k")
    expandable = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    outcome = Outcome(ok=True)
    for name, variables in (("as it is", {}), ("expandable", expandable)):
        found, command = probed(setup, name, "recipes/llama.py", flags, 12, 2, **variables)
        row = {"segments": name, "result": found.get("failed", "trained")}
        if "allocated" in found:
            for kind in ("allocated", "active", "reserved"):
                row[f"{kind}, GiB"] = round(found[kind] / 2**30, 2)
            row["reserved to allocated"] = round(found["reserved"] / found["allocated"], 3)
        outcome.ok = outcome.ok and "failed" not in found
        outcome.rows.append(row)
        outcome.commands.append(command)
        setup.keep(outcome)
    return outcome


# ---- Saves ----

PARTS = ("fault_tolerance.py", "whole_state.py")


def saves(setup):
    """Seconds of a save of full training state, by the functions that take them."""
    flags, _ = model_and_rows(setup, "1B", {"per_device_train_batch_size": 1, "max_length": 1024})
    folder = setup.work / "run"
    flags |= {"output_dir": folder, "max_steps": 3, "save_steps": 3, "eval_strategy": "no"}
    profile = setup.work / "profile.bin"
    command = [sys.executable, "-m", "cProfile", "-o", profile]
    command += ["recipes/llama.py", *benchmark.as_words(flags)]
    command = [str(word) for word in command]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment_of(setup),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max(setup.seconds_left(), 1),
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {launches.error_of(done.stdout)}")
    checkpoints = sorted(folder.glob("checkpoint-*"))
    files = [path for path in checkpoints[-1].rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    first_row = {
        "function": "checkpoint, GiB",
        "calls": len(checkpoints),
        "seconds": None,
        "size": round(size / 2**30, 3),
    }
    rows = [row for row in profile_rows(profile) if row["seconds"] >= 0.005]
    return Outcome([first_row, *rows], None, [launches.printable(command, setup)])


def profile_rows(path):
    """Return the 20 functions that took the most seconds of a save, those inside them included.

    They are the functions of the files of PARTS, and what these call directly. What is called from
    elsewhere too counts with its calls from these files alone.
    """
    found = []
    for (file, _, function), facts in pstats.Stats(str(path)).stats.items():
        _, calls, _, seconds, callers = facts
        name = f"{Path(file).name}: {function}"
        if Path(file).name not in PARTS:
            calls, seconds = calls_from_parts(callers)
            name = f"called there: {function}"
        if calls:
            found.append({"function": name, "calls": calls, "seconds": round(seconds, 3)})
    found.sort(key=lambda row: row["seconds"], reverse=True)
    return found[:20]


def calls_from_parts(callers):
    """Return (calls, seconds) of a function from the files of PARTS.

    callers: {(file, line, function): (calls, calls that are not recursive, seconds without and with
    what they call)}, as cProfile has it.
    """
    calls = 0
    seconds = 0
    for (file, _, _), facts in callers.items():
        if Path(file).name in PARTS:
            calls += facts[0]
            seconds += facts[3]
    return calls, seconds


# ---- Images ----


IMAGE_MODEL = (  # a ViT-base, and rows
    "--hidden_size 768 --num_hidden_layers 12 --num_attention_heads 12 --intermediate_size 3072 "
    "--image_size 224 --patch_size 16 --num_train_rows 2048 --num_test_rows 16"
)
TINY_IMAGE_MODEL = "--num_train_rows 64 --num_test_rows 16"


def image_workers(setup):
    """Seconds a step of a ViT-base with 0, 8 and 16 processes that read images."""
    shape = TINY_IMAGE_MODEL if setup.tiny else IMAGE_MODEL
    steps = 4 if setup.tiny else 25
    batch = 4 if setup.tiny else 64
    folder = launches.made(setup.models / "images", ("vit", *shape.split()))
    words = [str(word) for word in data_of(folder)]
    flags = {}
    for name, value in zip(words[::2], words[1::2], strict=True):
        flags[name.removeprefix("--")] = value
    flags["per_device_train_batch_size"] = batch
    outcome = Outcome(ok=True)
    alone = None  # seconds a step without such processes
    for workers in (0, 1) if setup.tiny else (0, 8, 16):
        own = flags | {"dataloader_num_workers": workers}
        found, command = probed(setup, f"{workers} workers", "recipes/vit.py", own, steps, 2)
        row = {"workers": workers, "result": found.get("failed", "trained")}
        if "seconds_per_step" in found:
            seconds = found["seconds_per_step"]
            alone = alone or seconds
            row["images/s"] = round(batch / seconds)
            row["times faster"] = round(alone / seconds, 2)
        outcome.ok = outcome.ok and "failed" not in found
        outcome.rows.append(row)
        outcome.commands.append(command)
        setup.keep(outcome)
    return outcome
