# SPDX-License-Identifier: Apache-2.0
"""A race of the recipe, Trainer and SFTTrainer, and what each lever brings to the recipe.

    pytest evidence/gpu/test_race.py --all -k "8b_lora and equal"

Weights are random. Each race is run at equal settings and with each program at its own fastest. A
repeat has a process for each contestant, and the next repeat begins with another one. A ladder
trains the recipe for 20 steps with one lever after the other, whose losses must be those of its
first rung.

About the time on an H200: a process takes 12 s beside its steps (results/gpu/side_by_side.json),
the model 30 s; Trainer compiles 32 layers as one graph, here taken as 100 s, and 35 s from the
cache. That is 5 to 7 minutes for a race at equal settings, 6 to 9 for 8B at the fastest, and 2 to 3
for a ladder, so that each race and each ladder fits into a command of ten minutes.
"""

import statistics
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import contestants
from contestants import NOT_IN_SMALL, Job
from core.summary import flops_per_token
from gpu.runs import LOSS_BOUND
from jobs import LLAMA_3_1_8B

REPEATS = 3
PEAK_FLOPS = 989e12  # of an H100 and H200 in dense bf16 (NVIDIA's data sheets)
LLAMA_8B = {name: size for name, size in LLAMA_3_1_8B.items() if name != "model_type"}
LLAMA_1B = LLAMA_8B | {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "intermediate_size": 8192,
    "tie_word_embeddings": True,
}
ON_GPU = ("--device", "cuda", "--dtype", "bfloat16")  # where make_tiny.py makes the weights
COMMON = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "weight_decay": 0.0,
    "per_device_train_batch_size": 2,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
}
LORA = COMMON | {"use_peft": True, "lora_r": 16, "dtype": "bfloat16", "max_length": 4096}
CHECKPOINTED = {"gradient_checkpointing": True}
NF4 = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
# Without fp32 weights, in which small updates are lost: the recipe refuses it without the flag
BF16 = COMMON | {"dtype": "bfloat16", "no_master_weights": True}
FULL = BF16 | {"max_length": 4096}
QLORA = LORA | NF4 | {"max_length": 2048}
# Rows of 2 % to 50 % of a packed one: 16 of them have about as many tokens as five that are packed
VARIED = BF16 | {"max_length": 2048, "per_device_train_batch_size": 16}
EAGER = {"torch_compile": "off"}
ALIKE = {"ours": EAGER, "trainer": {}, "trl": {}}
COMPILED = {"torch_compile": "on"}
SELECTIVE = {"gradient_checkpointing": "selective"}
FLOAT8 = COMPILED | {"load_in_fp8": True}
LIGER = {"use_liger_kernel": True}
# Nothing is recomputed, since there is memory for that; Liger's kernels also keep no whole logits.
OTHERS = {"trainer": LIGER | {"torch_compile": True}, "trl": LIGER | {"torch_compile": True}}
PACKED = {"packing": True, "per_device_train_batch_size": 5}
# Batches of Trainer and SFTTrainer change in shape, for which layers would be compiled again.
LONG_AND_SHORT = {
    "ours": PACKED | COMPILED,
    "trainer": LIGER | {"train_sampling_strategy": "group_by_length"},
    "trl": PACKED | LIGER,
}
# {cell: (flags of all contestants, those of each)}
RACES = {
    "8b_lora_equal": (LORA, ALIKE),
    "8b_lora_fastest": (LORA, {"ours": COMPILED, "ours float8": FLOAT8} | OTHERS),
    "8b_full_equal": (FULL | CHECKPOINTED, ALIKE),
    "8b_full_fastest": (FULL, {"ours": COMPILED | SELECTIVE} | OTHERS),
    "8b_qlora_equal": (QLORA | CHECKPOINTED, ALIKE),
    "8b_qlora_fastest": (QLORA, {"ours": COMPILED} | OTHERS),
    "1b_varied_equal": (VARIED, ALIKE),
    "1b_varied_fastest": (VARIED, LONG_AND_SHORT),
}
LADDERS = {
    "8b_lora_ladder": {
        "ours": EAGER,
        "ours selective": EAGER | SELECTIVE,
        "ours compiled": COMPILED,
        "ours compiled float8": FLOAT8,
    },
    "8b_full_ladder": {
        "ours": EAGER | CHECKPOINTED,
        "ours selective": EAGER | SELECTIVE,
        "ours selective compiled": COMPILED | SELECTIVE,
        "ours compiled": COMPILED,
    },
    "8b_qlora_ladder": {
        "ours": EAGER | CHECKPOINTED,
        "ours recomputed compiled": CHECKPOINTED | COMPILED,
        "ours compiled": COMPILED,
    },
}
LADDER_FLAGS = {"8b_lora_ladder": LORA, "8b_full_ladder": FULL, "8b_qlora_ladder": QLORA}
CELLS = RACES | {name: (LADDER_FLAGS[name], rungs) for name, rungs in LADDERS.items()}
# (cell, contestant, figure, the least that it should be)
AIMS = [
    ("8b_lora_ladder", "ours compiled", "tokens/s", 15_000),
    ("8b_lora_ladder", "ours compiled float8", "tokens/s", 18_500),
    ("8b_full_ladder", "ours selective compiled", "MFU, causal", 0.6),
    ("8b_qlora_ladder", "ours recomputed compiled", "tokens/s", 9_000),
]


@pytest.mark.whole
@pytest.mark.parametrize("name", CELLS)
def test_race(name, cell):
    is_ladder = name in LADDERS
    aims = [aim[1:] for aim in AIMS if aim[0] == name]
    is_packed = any("packing" in own for own in CELLS[name][1].values())  # each in its own way
    bound = "" if is_packed else "; ".join([f"losses within {LOSS_BOUND:g}", *map(told, aims)])
    claim = "each lever of the recipe" if is_ladder else "the recipe, Trainer and SFTTrainer"
    cell.proves(f"race.{name}", f"{claim}, {name.replace('_', ' ')}", bound)
    job = race_of(name, cell)
    home = home_of(cell, job)
    contestants.prepare(job, home)
    flops = flops_of(job, home)
    runs = {label: [] for label in job.contestants}
    for order in orders(list(runs), 1 if is_ladder else REPEATS):
        for label in order:
            runs[label].append(contestants.run(job, label, home))
    cell.rows += [row_of(label, runs, flops, job) for label in runs]
    rows = {row["label"]: row for row in cell.rows}
    for label in ("ours", *(label for label, _, _ in aims)):
        assert rows[label]["result"] == "trained", rows[label]
    agrees = all(row.get("loss differs by", 0.0) <= LOSS_BOUND for row in rows.values())
    assert agrees or cell.on_gpu, rows
    reached = [statistics.median(rows[label][key]) >= least for label, key, least in aims]
    cell.claim["holds"] = agrees and all(reached) if bound and cell.on_gpu else None


def told(aim):
    """One aim as text."""
    label, key, least = aim
    return f"{label.removeprefix('ours ')}: at least {least:,} {key}"


def race_of(name, cell):
    """The job of a cell, or a tiny one for a CPU, which compiles nothing and has no Liger."""
    flags, own = CELLS[name]
    if not cell.on_gpu:
        dropped = (*NOT_IN_SMALL, "torch_compile", "use_liger_kernel")
        for label, values in own.items():
            kept = {key: value for key, value in values.items() if key not in dropped}
            own = own | {label: kept}
    shape = LLAMA_1B if name.startswith("1b") else LLAMA_8B
    steps = 17 if name in LADDERS else 5  # and three before
    job = job_of(cell, f"race {name}", flags, own, shape, steps)
    return replace(job, rows="varied") if shape is LLAMA_1B else job


def job_of(cell, name, flags, own, shape, steps):
    """A job of one GPU, or a tiny one for a CPU."""
    job = Job(name, shape, flags, own, steps=steps, device="cuda", maker=ON_GPU)
    return job if cell.on_gpu else job.in_small()


def home_of(cell, job):
    """The folder of all jobs with a model of this shape, since making it takes a minute."""
    return cell.models / f"hidden_size_{job.shape['hidden_size']}"


def orders(labels, repeats):
    """The labels once for each repeat, which begins with another one each time."""
    for repeat in range(repeats):
        start = repeat * len(labels) // repeats
        yield labels[start:] + labels[:start]


def flops_of(job, home):
    """FLOPs of training on a token, as the recipe counts its own: causal attention in each row."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(home / "model")
        model = AutoModelForCausalLM.from_config(config)
        if "use_peft" in job.flags:
            model = get_peft_model(model, LoraConfig(target_modules="all-linear", r=16))
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    file = str(home / "rows.jsonl")
    rows = contestants.tokenized_rows(file, tokenizer, job.flags["max_length"])
    return flops_per_token(model, None, np.array(list(map(len, rows["input_ids"]))))


def row_of(label, runs, flops, job):
    """One line: the speed in each repeat, the largest peak of memory, and the loss.

    Losses are compared with those of the first contestant, unless batches are packed differently.
    """
    first, *_ = runs.values()
    row = {"label": label, "flags": job.contestants[label], "result": "trained"}
    failures = [run["failed"] for run in (*runs[label], *first) if "failed" in run]
    if failures:
        return row | {"result": failures[0]}
    speeds = [run["tokens_per_second"] for run in runs[label]]
    row |= {"tokens/s": [round(speed) for speed in speeds]}
    row["MFU, causal"] = [round(flops * speed / PEAK_FLOPS, 3) for speed in speeds]
    kind = "allocated" if "allocated" in runs[label][0]["memory_mib"] else "resident"
    peak = max(run["memory_mib"][kind] for run in runs[label])
    row[f"{kind}, GiB"] = round(peak / 1024, 2)
    if not any("packing" in own for own in job.contestants.values()):
        losses = np.array([run["losses"] for run in runs[label]])
        row["loss differs by"] = float(abs(losses / first[0]["losses"] - 1).max())
    return row
