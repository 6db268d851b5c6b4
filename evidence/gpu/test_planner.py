# SPDX-License-Identifier: Apache-2.0
"""What scripts/plan_memory.py plans for a GPU, and the tensors that the runs there had."""

import json
import subprocess
import sys

import pytest

import contestants
from gpu.runs import REPO
from gpu.test_race import CHECKPOINTED, COMMON, LLAMA_1B, LLAMA_8B, LORA, NF4, home_of, job_of

QLORA = LORA | NF4
# (rows, their tokens, flags)
SMALL = [
    (1, 1024, COMMON),
    (2, 1024, COMMON),
    (4, 1024, COMMON | CHECKPOINTED),
    (2, 4096, COMMON | CHECKPOINTED),
    (1, 4096, LORA),
    (4, 2048, LORA),
    (2, 2048, QLORA),
    (1, 4096, QLORA | CHECKPOINTED),
]
LARGE = [
    (1, 1024, LORA),
    (2, 2048, LORA | CHECKPOINTED),
    (2, 2048, QLORA | CHECKPOINTED),
    (1, 1024, QLORA),
    (1, 4096, LORA | CHECKPOINTED),
    (4, 1024, QLORA | CHECKPOINTED),
]
CELLS = {"small": ("1B", LLAMA_1B, SMALL), "large": ("8B", LLAMA_8B, LARGE)}


@pytest.mark.whole
@pytest.mark.parametrize("name", CELLS)
def test_plan(name, cell):
    model, shape, points = CELLS[name]
    cell.proves(f"planner.{name}", f"tensors and memory of {model} runs against the plan")
    for rows, length, flags in points if cell.on_gpu else points[:2]:
        sizes = {"per_device_train_batch_size": rows, "max_length": length}
        job = job_of(cell, name, flags | sizes, {"ours": {}}, shape, steps=2)
        home = home_of(cell, job)
        contestants.prepare(job, home)
        run = contestants.run(job, "ours", home)
        assert "failed" not in run, run
        more = contestants.words_of(dict(flags.items() - COMMON.items()))
        row = {"run": " ".join([f"{model} {rows} x {length}", *more]), "result": "trained"}
        row["planned tensors"] = planned_tensors(job, home, cell)
        peaks = {kind: round(mib * 2**20) for kind, mib in run["memory_mib"].items()}
        cell.rows.append(row | peaks)


def planned_tensors(job, home, cell):
    """Bytes of tensors at the peak of the recipe, as scripts/plan_memory.py plans them."""
    config = ["--config_file", "accelerate_configs/single.yaml", "--num_processes", "1"]
    config += ["--mixed_precision", "bf16" if cell.on_gpu else "no", "--json", home / "plan.json"]
    if cell.on_gpu:
        config += ["--gpu", f"{cell.facts['memory_mib'] / 1024}GiB"]
    files = {"model_name_or_path": home / "model", "dataset_name": home / "rows.jsonl"}
    flags = job.flags | job.contestants["ours"] | files | {"eval_strategy": "no"}
    command = [sys.executable, "scripts/plan_memory.py", *config, "recipes/llama.py"]
    command += contestants.words_of(flags)
    subprocess.run(command, cwd=REPO, check=True, capture_output=True)
    planned = json.loads((home / "plan.json").read_text())["device"]
    return sum(planned.values()) - planned.get("constants", 0)
