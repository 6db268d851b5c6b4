# SPDX-License-Identifier: Apache-2.0
"""No framework tax: the recipe beside bare loops, Trainer and SFTTrainer, on two CPU cores.

Contestants (contestants.py) run in turn, A B C A B C, each with one thread, on an idle machine.
There are three kinds of jobs, and a run that fails its gate has no figure:

    matched    the same batches in the same order, optimizer, dtype and attention; the loss of each
               step must be that of the bare loop
    shipped    each tool with its own defaults, in fp32, one pass over the same rows; afterwards the
               loss on held-out rows must be within 2 % of the bare loop's
    start      from the start of the process to the end of the first step, tokenization included

    pytest evidence/test_speed.py --all    # hours; GSM8K's rows are in ../shared/data/gsm8k
"""

import json
import math
import os
import platform
import subprocess
import time
from dataclasses import replace

import pytest

import contestants
from contestants import GSM8K, MOST_LOAD, NEAR_ZERO, REPO, Job

REPEATS = 5
CURVE = {"cpu": 1e-5, "cuda": 1e-2}  # nats: fp32, and autocast to bf16
HELD_OUT = 0.02  # relative
HELD_OUT_ROWS = 200
HELD_OUT_LENGTH = 1024  # tokens
# The vocabulary is 32 times as large as the hidden state, as in Llama 3.
MEDIUM = {
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 1408,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}
# A step of it takes very little time
QUICK = MEDIUM | {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "intermediate_size": 384,
    "vocab_size": 4096,
}
LEARN = {
    "learning_rate": 5e-4,
    "lr_scheduler_type": "linear",
    "max_grad_norm": 1.0,
    "max_length": 512,
    "per_device_train_batch_size": 8,
}
MATCHED = LEARN | {
    "weight_decay": 0.1,
    "train_sampling_strategy": "sequential",
    "logging_steps": 1,
}
FIVE = {"floor": {}, "lean": {}, "ours": {}, "trainer": {}, "trl": {}}
PACKED = {"packing": True, "per_device_train_batch_size": 3}
# Sequential batches, since the order would already change the loss; so would 200 rows, by 2 %
SHIPPED = {"floor": {}, "ours": PACKED, "trainer": {}, "trl": {}, "trl packed": PACKED}
STARTING = {"floor": {}, "ours": {}, "trainer": {}}
START = Job("start", QUICK, MATCHED, STARTING, steps=1, warmup=0, num_rows=7473)
TWO_ROWS = MATCHED | {"per_device_train_batch_size": 2}  # a step of about a second
SMALLEST = Job("matched, near zero", NEAR_ZERO, MATCHED, FIVE, rows="words", steps=1000)
JOBS = [
    Job("matched, medium", MEDIUM, TWO_ROWS, FIVE, warmup=5),
    SMALLEST,
    Job("shipped, medium", MEDIUM, LEARN, SHIPPED, steps=0, num_rows=256, matched=False),
    replace(START, name="start, cold cache"),
    replace(START, name="start, warm cache"),
]


@pytest.mark.whole
@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_speed(job, record, tmp_path):
    if not (GSM8K / "train.jsonl").is_file():
        pytest.skip(f"GSM8K's rows are not in {GSM8K}")
    contestants.prepare(job, tmp_path)
    cold = job.name == "start, cold cache"
    if job.name == "start, warm cache":
        run_all(job, tmp_path, cold=False, repeat=0)
    runs = []
    for repeat in range(REPEATS):
        contestants.wait_until_idle()
        runs += run_all(job, tmp_path, cold, repeat)
    judged = judge(runs, job)
    record(**facts_of(job), runs=judged)
    assert {run["void"] for run in judged} <= {"", "loaded"}


def run_all(job, home, cold, repeat):
    """Runs of all contestants of a job, each once."""
    runs = []
    for label in job.contestants:
        run = contestants.run(job, label, home, cold) | {"repeat": repeat}
        if not job.matched and "failed" not in run:
            folder = home / "runs" / contestants.slug(f"{job.name} {label}") / "run"
            run["held_out_loss"] = round(held_out_loss(folder, home / "model"), 5)
        runs.append(run)
    return runs


def facts_of(job):
    """What is needed to measure a job again."""
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=REPO)
    text = open("/proc/cpuinfo").read()
    processor = text.split("model name\t: ")[-1].splitlines()[0] or platform.machine()
    return {
        "cell": job.name,
        "device": f"{processor}, {os.cpu_count()} cores, one thread a process",
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.decode().strip(),
        "warmup": job.warmup,
        "rows": job.rows,
        "shape": job.shape,
        "flags": {label: job.flags | own for label, own in job.contestants.items()},
    }


def judge(runs, job):
    """The runs without their losses, each with its `difference` from the bare loop and `void`.

    `void` is why it does not count, or "".
    """
    floors = {run["repeat"]: run for run in runs if run["contestant"] == "floor"}
    judged = []
    for run in runs:
        difference, why = verdict(run, floors[run["repeat"]], job)
        if not why and job.device == "cpu" and run["load"] > MOST_LOAD:
            why = "loaded"
        kept = {name: value for name, value in run.items() if name != "losses"}
        judged.append(kept | {"difference": difference, "void": why})
    return judged


def verdict(run, floor, job):
    """The difference of a run from the bare loop, None if unknown, and why it is void, or ""."""
    for one in (run, floor):
        if "failed" in one:
            return None, f"{one['contestant']} failed"
    if not job.matched:
        difference = abs(run["held_out_loss"] / floor["held_out_loss"] - 1)
        return difference, "" if difference <= HELD_OUT else "another loss on held-out rows"
    ours = run["losses"]
    theirs = floor["losses"]
    if len(ours) != len(theirs) or None in ours:
        return None, f"{len(ours)} losses, the bare loop has {len(theirs)}"
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    if not all(map(math.isfinite, differences)):  # max would ignore a NaN
        return None, "loss not finite"
    largest = max(differences)
    return largest, "" if largest <= CURVE[job.device] else f"loss differs by {largest:.1e}"


def held_out_loss(folder, base):
    """The loss of a saved model on GSM8K's test rows, in nats per supervised token."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import llama
    from core.chat import ChatTemplate

    tokenizer = AutoTokenizer.from_pretrained(base)
    template = ChatTemplate(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    total = 0.0
    count = 0
    for line in (GSM8K / "test.jsonl").read_text().splitlines()[:HELD_OUT_ROWS]:
        row = llama.tokenize_row(json.loads(line), template, HELD_OUT_LENGTH)
        ids = torch.tensor([row["input_ids"]])
        labels = torch.tensor([row["labels"]])
        supervised = (labels[:, 1:] != -100).sum().item()
        with torch.no_grad():
            total += model(ids, labels=labels).loss.item() * supervised
        count += supervised
    return total / count


# ---- The short form: the gate ----
def test_all_contestants_train_alike_and_another_learning_rate_is_void(tmp_path):
    job = SMALLEST.in_small()
    planted = {"trainer planted": {"learning_rate": 6e-4}}
    job = replace(job, contestants=dict(job.contestants) | planted)
    contestants.prepare(job, tmp_path)
    runs = judge(run_all(job, tmp_path, cold=False, repeat=0), job)
    voids = {run["contestant"]: run["void"].replace("loaded", "") for run in runs}
    assert "loss differs" in voids.pop("trainer planted")
    assert voids == dict.fromkeys(FIVE, "")
    assert len({(run["steps"], run["tokens"]) for run in runs}) == 1
    assert all(run["seconds_per_step"] > 0 for run in runs)


@pytest.mark.parametrize("losses", [[2.0, 1.0], [2.0, None, 1.5], [2.0, math.nan, 1.5], [2, 1, 2]])
def test_a_run_with_another_curve_does_not_count(losses):
    floor = {"contestant": "floor", "repeat": 0, "losses": [2.0, 1.0, 1.5], "load": 1.0}
    judged = judge([floor, floor | {"contestant": "ours", "losses": losses}], SMALLEST)
    assert judged[0]["void"] == "" and judged[1]["void"]
