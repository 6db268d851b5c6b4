"""Cells that measure speed and memory of the recipe at real sizes, beside a bare loop, Trainer and
SFTTrainer.
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
import parity

from . import launches, machine
from .cell import ROOT, Outcome, Skip

TOOLS = ("ours", "lean", "floor", "trainer", "trl")
LOSS_GATE = benchmark_tables.CURVE["bfloat16"]  # nats, of each step
LEAN = benchmark_tables.NAMES["lean"]
BARE_LOOPS = (LEAN, benchmark_tables.NAMES["floor"])
MOST_OVER_LEAN = 1.05  # a step of the recipe to one of the bare loop that computes the same
# Published for one Hopper GPU; see docs of each source for its settings, which the cells take over
NEMO_TOKENS, NEMO_SHARE = (
    12_473,
    0.7,
)  # NeMo AutoModel, Llama 3 8B LoRA, one H100, TransformerEngine and Triton
KEMPNER_MFU, LEAST_MFU = 0.578, 0.45  # KempnerForge, 8B full, one H200
TORCHTUNE_PEAK_GIB, MOST_PEAK_GIB = (
    7.4,
    8.0,
)  # torchtune, Llama 3.1 8B QLoRA, two rows of 2,048 tokens, one RTX 4090
LORA = {"use_peft": True, "lora_r": 16, "dtype": "bfloat16"}
NF4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
COMMON = benchmark.MATCHED | {"max_length": 4096, "weight_decay": 0.0}
RUN_TIME = 45  # seconds that a run of the 8B model takes at least, most of it reading weights


def settings(setup, warmup=3):
    """What scripts/benchmark.py's functions read of its command line; rows are made, since no data
    is at hand.
    """
    return SimpleNamespace(
        output_dir=setup.models, data=setup.models / "no data", smoke=setup.tiny, warmup=warmup
    )


def contest(setup, name, model, flags, contestants, rows="long", steps=10):
    """Run contestants of scripts/benchmark.py one after another; yields (label, what was measured)
    of each.

    With --tiny only the first two. Weights are deleted after each run. One for which no time is
    left, or whose package is missing, says so.
    """
    cell = benchmark.Cell(
        name, "growth", model, rows, contestants, COMMON | flags, steps, device=setup.device
    )
    if setup.tiny:
        two = dict(list(contestants.items())[:2])
        cell = benchmark.in_small(cell._replace(contestants=two))
    args = settings(setup)
    cell, left_out = benchmark.without_missing(cell)
    for label, reason in left_out.items():
        yield label, {"failed": f"left out: {reason}"}
    benchmark.make_models([model], args)
    for label, contestant in cell.contestants.items():
        if setup.seconds_left() < (RUN_TIME if model == "8B" and not setup.tiny else 10):
            yield label, {"failed": "no time left"}
            continue
        data = benchmark.prepare(cell, contestant, args)
        found = benchmark.run_once(cell, label, data, args)
        benchmark.delete_weights(
            args.output_dir / "cells" / benchmark.slug(cell.name) / benchmark.slug(label)
        )
        command = benchmark.command_of(cell, contestant, data, setup.models / "RUN", args)
        yield label, found | {"command": launches.printable(command, setup)}


def row_of(label, found, model, flags, device):
    """One line: speed, memory in GiB, and the share of the GPU's peak where that is known."""
    name = benchmark_tables.NAMES.get(label, label)
    if "failed" in found:
        return {"what": name, "result": found["failed"]}
    row = {
        "what": name,
        "result": "trained" if not found["loaded"] else "trained, beside another process",
        "tokens/s": round(found.get("tokens_per_second", 0)),
        "ms a step": round(found.get("seconds_per_step", 0) * 1e3, 1),
    }
    for kind in ("allocated", "reserved"):
        if kind in found["memory_mib"]:
            row[f"{kind}, GiB"] = round(found["memory_mib"][kind] / 1024, 2)
    peak = next((peak for card, peak in benchmark_tables.PEAK.items() if card in device), None)
    if peak and "tokens_per_second" in found:
        shape = benchmark.MODELS[model]
        work = benchmark_tables.flops_per_token(
            shape, flags["max_length"], flags.get("use_peft", False)
        )
        row["MFU"] = round(work * found["tokens_per_second"] / peak, 3)
    return row


def device_name(setup):
    return machine.facts(setup.device)["device"]


def side_by_side(model, flags, judge, name):
    """A cell that trains the same batches with the recipe, two bare loops, Trainer and SFTTrainer.

    judge: function of the recipe's row that says whether the published figure's bound holds, None
    if it has none here.
    """

    def run(setup):
        needs = {"trl": "trl"}
        contestants = {
            tool: benchmark.Contestant(tool, needs=needs.get(tool, "")) for tool in TOOLS
        }
        if machine.version_of("datasets") is None:
            raise Skip("not installed: datasets")
        outcome, ours, all_flags = Outcome(), {}, COMMON | flags
        device = device_name(setup)
        for label, found in contest(setup, name, model, flags, contestants):
            row = row_of(label, found, model, all_flags, device)
            if label == "ours":
                ours = found
            if "losses" in found and "losses" in ours:
                pairs = zip(found["losses"], ours["losses"], strict=False)
                row["loss differs by"] = max(abs(a - b) for a, b in pairs)
            if "seconds_per_step" in found and "seconds_per_step" in ours:
                row["times the recipe's step"] = round(
                    found["seconds_per_step"] / ours["seconds_per_step"], 3
                )
            outcome.rows.append(row)
            outcome.commands.append(found.get("command", ""))
            outcome.ok = verdict(outcome.rows, judge, setup)
            setup.keep(outcome)
        return outcome

    return run


def verdict(rows, judge, setup):
    """Whether the recipe trained, agrees with the bare loops, is about as fast as the one that
    computes the same, and is within the cell's own bound; None where that cannot be judged.
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
    return ours["MFU"] >= LEAST_MFU if "MFU" in ours else None


def no_published_figure(ours):
    return True


def small_enough_qlora(ours):
    return ours["allocated, GiB"] <= MOST_PEAK_GIB if "allocated, GiB" in ours else None


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
    """The 8B model of the cells that follow, drawn on the GPU and written once."""
    args = settings(setup)
    folder = args.output_dir / "models" / "8B"
    benchmark.make_models(["8B"], args)
    size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    return Outcome([{"bytes of weights": size}], size > 0)


# ---- Levers ----


def ladder(levers, model="8B", base=None, rows="long", name="ladder"):
    """A cell that adds levers to one job, each alone: a dictionary from name to (flags, package it
    needs).
    """

    def run(setup):
        flags = base or (LORA | {"per_device_train_batch_size": 2})
        contestants = {"as it is": benchmark.Contestant("ours")}
        for lever, (more, needs) in levers.items():
            contestants[lever] = benchmark.Contestant("ours", more, needs=needs)
        outcome, first, device = Outcome(ok=True), {}, device_name(setup)
        for label, found in contest(setup, f"proof {name}", model, flags, contestants, rows):
            merged = COMMON | flags | levers.get(label, ({}, ""))[0]
            row = row_of(label, found, model, merged, device)
            first = first or (found if label == "as it is" else {})
            if "seconds_per_step" in found and "seconds_per_step" in first:
                row["step, x as it is"] = round(
                    found["seconds_per_step"] / first["seconds_per_step"], 3
                )
            broke = "failed" in found and not found["failed"].startswith(("left out", "no time"))
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

    Returns seconds a step after the warm-up and the probe's peaks in bytes, or {"failed": why}; and
    the command line.
    """
    folder = setup.work / re.sub(r"\W+", "_", name)
    folder.mkdir(parents=True, exist_ok=True)
    launcher = [sys.executable]
    if config:
        launcher += [
            "-m",
            "accelerate.commands.launch",
            "--config_file",
            f"accelerate_configs/{config}.yaml",
        ]
        launcher += ["--main_process_port", "0"]
    probe = [
        "scripts/benchmark_probe.py",
        folder / "probe.json",
        "--warmup",
        warmup,
        "--steps",
        steps,
    ]
    common = {"max_steps": steps, "output_dir": folder / "run", "eval_strategy": "no"}
    command = [*launcher, *probe, script, *benchmark.as_words({"save_steps": 0} | flags | common)]
    command = [str(word) for word in command]
    environment = {**os.environ, **variables}
    if setup.device == "cpu":
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    elif not config:
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    seconds = setup.seconds_left()
    if seconds < 5:
        return {"failed": "no time left"}, launches.printable(command, setup)
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
        return {"failed": "no time left"}, launches.printable(command, setup)
    (folder / "output.txt").write_text(done.stdout)
    if done.returncode:
        why = f"exit code {done.returncode}: {launches.error_of(done.stdout)}"
        return {"failed": why}, launches.printable(command, setup)
    probe = json.loads((folder / "probe.json").read_text())
    ends = probe["ends"]
    found = dict(probe["memory"])
    if len(ends) > warmup:
        found["seconds_per_step"] = (ends[-1] - ends[warmup - 1]) / (len(ends) - warmup)
    return found, launches.printable(command, setup)


def model_and_rows(setup, model, flags, rows="long"):
    """(flags that name a model of scripts/benchmark.py and its rows, folder of the rows)."""
    cell = benchmark.Cell(
        "rows", "growth", model, rows, {"ours": benchmark.Contestant("ours")}, COMMON | flags, 12
    )
    cell = cell._replace(device=setup.device)
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
    outcome, slow = Outcome(ok=True), {}
    for config in configs:
        for threads in (1, cores):
            found, command = probed(
                setup,
                f"{config} {threads}",
                "recipes/llama.py",
                flags,
                5,
                2,
                config,
                OMP_NUM_THREADS=str(threads),
            )
            outcome.commands.append(f"OMP_NUM_THREADS={threads} {command}")
            row = {"YAML": config, "threads": threads, "result": found.get("failed", "trained")}
            if "seconds_per_step" in found:
                row["seconds a step"] = round(found["seconds_per_step"], 3)
                slow.setdefault(config, found["seconds_per_step"])
                row["times faster"] = round(slow[config] / found["seconds_per_step"], 2)
            outcome.ok = outcome.ok and "failed" not in found
            outcome.rows.append(row)
            setup.keep(outcome)
    return outcome


def fragmentation(setup):
    """Memory that the allocator holds above what tensors take, for rows of varying length."""
    flags, _ = model_and_rows(
        setup, "1B", {"per_device_train_batch_size": 4, "max_length": 2048}, "gsm8k"
    )
    outcome = Outcome(ok=True)
    for name, variables in (
        ("as it is", {}),
        ("expandable", {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
    ):
        found, command = probed(setup, name, "recipes/llama.py", flags, 12, 2, **variables)
        row = {"segments": name, "result": found.get("failed", "trained")}
        if "allocated" in found:
            row |= {
                f"{kind}, GiB": round(found[kind] / 2**30, 2)
                for kind in ("allocated", "active", "reserved")
            }
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
    model = "1B"
    flags, _ = model_and_rows(setup, model, {"per_device_train_batch_size": 1, "max_length": 1024})
    flags |= {
        "output_dir": setup.work / "run",
        "max_steps": 3,
        "save_steps": 3,
        "eval_strategy": "no",
    }
    profile = setup.work / "profile.bin"
    command = [
        sys.executable,
        "-m",
        "cProfile",
        "-o",
        profile,
        "recipes/llama.py",
        *benchmark.as_words(flags),
    ]
    command = [str(word) for word in command]
    environment = dict(os.environ)
    if setup.device == "cuda":
        environment["ACCELERATE_MIXED_PRECISION"] = "bf16"
    else:
        environment |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max(setup.seconds_left(), 1),
    )
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {launches.error_of(done.stdout)}")
    rows = [row for row in profile_rows(profile) if row["seconds"] >= 0.005]
    checkpoints = sorted((setup.work / "run").glob("checkpoint-*"))
    size = sum(path.stat().st_size for path in checkpoints[-1].rglob("*") if path.is_file())
    rows.insert(
        0,
        {
            "function": "checkpoint, GiB",
            "calls": len(checkpoints),
            "seconds": None,
            "size": round(size / 2**30, 3),
        },
    )
    return Outcome(rows, None, [launches.printable(command, setup)])


def profile_rows(path):
    """The functions of the files of PARTS, and what these call directly, by the seconds they took in
    all. What is called from elsewhere too counts with its calls from these files alone.
    """
    found = []
    for (file, _, function), facts in pstats.Stats(str(path)).stats.items():
        _, calls, _, seconds, callers = facts
        name = f"{Path(file).name}: {function}"
        if Path(file).name not in PARTS:
            from_parts = [of for caller, of in callers.items() if Path(caller[0]).name in PARTS]
            calls = sum(of[0] for of in from_parts)
            seconds = sum(of[3] for of in from_parts)
            name = f"called there: {function}"
        if calls:
            found.append({"function": name, "calls": calls, "seconds": round(seconds, 3)})
    return sorted(found, key=lambda row: -row["seconds"])[:20]


# ---- Images ----


def image_workers(setup):
    """Seconds a step of a ViT-base with 0, 8 and 16 processes that read images."""
    shape = [
        "--hidden_size",
        768,
        "--num_hidden_layers",
        12,
        "--num_attention_heads",
        12,
        "--intermediate_size",
        3072,
        "--image_size",
        224,
        "--patch_size",
        16,
        "--num_train_rows",
        2048,
        "--num_test_rows",
        16,
    ]
    if setup.tiny:
        shape = ["--num_train_rows", 64, "--num_test_rows", 16]
    tiny = launches.made(setup.models / "images", ("make_tiny_vit.py", *shape))
    words = [str(word) for word in parity.data_of(tiny)]
    flags = {
        name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)
    }
    flags |= {"per_device_train_batch_size": 64 if not setup.tiny else 4}
    outcome, alone = Outcome(ok=True), None
    for workers in (0, 8, 16) if not setup.tiny else (0, 1):
        found, command = probed(
            setup,
            f"{workers} workers",
            "recipes/vit.py",
            flags | {"dataloader_num_workers": workers},
            25 if not setup.tiny else 4,
            2,
        )
        row = {"workers": workers, "result": found.get("failed", "trained")}
        if "seconds_per_step" in found:
            alone = alone or found["seconds_per_step"]
            row["images/s"] = round(
                flags["per_device_train_batch_size"] / found["seconds_per_step"]
            )
            row["times faster"] = round(alone / found["seconds_per_step"], 2)
        outcome.ok = outcome.ok and "failed" not in found
        outcome.rows.append(row)
        outcome.commands.append(command)
        setup.keep(outcome)
    return outcome
