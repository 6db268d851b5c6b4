# SPDX-License-Identifier: Apache-2.0
"""Runs that lost their second half resume from their checkpoint with the same losses."""

import json
import shutil
from dataclasses import replace

import pytest

from gpu.runs import Variant, largest_difference, needs_compiler, train_all

BOUND = "the losses after the checkpoint within 2e-3 of those without a stop"
# Relative: kernels sum in no fixed order, and AdamW amplifies the difference over ten steps.
LOSS_BOUND = 2e-3
PEAK_BOUND = 1.1  # peak of a resumed run to that of the run before
ZERO = {f"ZeRO-{stage}": f"deepspeed_zero{stage}" for stage in (0, 2, 3)}
OFFLOAD = {f"ZeRO-{stage} offload": f"deepspeed_zero{stage}_offload" for stage in (2, 3)}
FSDP2 = "fsdp2_full_shard"
FSDP = {"FSDP2": FSDP2, "FSDP2 offload": "fsdp2_cpu_offload", "FSDP1": "fsdp1_full_shard"}
CLAIMS = {
    "engines": "a run resumes under every engine",
    "optimizers": "a run resumes with every optimizer, and the paged ones stay paged",
    "precisions": "fp16 and quantized bases resume",
    "zero_offload": "ZeRO with offload resumes",
}


def variants_of(name, cell):
    """The variants of a cell, without the flags of the job."""
    if name == "engines":
        engines = {"one process, bf16": "single"} | FSDP | ZERO
        return [Variant(engine, config) for engine, config in engines.items()]
    if name == "zero_offload":
        needs_compiler()
        if not cell.on_gpu:
            pytest.skip("its optimizer is torch's on a CPU")
        return [Variant(what, config) for what, config in OFFLOAD.items()]
    if name == "optimizers":
        names = ("adamw_8bit", "adamw_torch_fused", "paged_adamw_8bit", "paged_adamw_32bit")
        return [Variant(optim, flags=("--optim", optim)) for optim in names]
    nf4 = cell.adapters("nf4")
    return [
        Variant("nf4 LoRA", flags=nf4),
        Variant("int8 LoRA", flags=cell.adapters("int8")),
        Variant("fp16", precision="fp16"),
        Variant("FSDP2 fp16", FSDP2, precision="fp16"),
        Variant("nf4 LoRA, FSDP2", FSDP2, flags=nf4),
        Variant("nf4 LoRA, ZeRO-3", "deepspeed_zero3", flags=nf4),
    ]


@pytest.mark.parametrize("name", CLAIMS)
def test_resumes(name, cell):
    """Run each variant, remove its newest checkpoint, run it again, and compare the losses."""
    bound = BOUND
    if name == "optimizers":
        bound += "; a resumed run's peak at most 1.1 times that before"
    cell.proves(f"resume.{name}", CLAIMS[name], bound)
    steps = 20 if cell.on_gpu else 4
    saving = ("--save_steps", str(steps // 2), "--save_total_limit", "9")
    jobs = []
    for variant in variants_of(name, cell):
        jobs.append(replace(variant, flags=cell.job(*variant.flags, *saving, steps=steps)))
    data = cell.model(wide=name == "optimizers")
    before = train_all(cell, jobs, data)
    for one in before:
        forget_second_half(one.folder / "run", steps)
    cell.rows.clear()
    for one, whole in zip(train_all(cell, jobs, data), before, strict=True):
        # What was done before the checkpoint was not done again: the speed in its lines is the same
        assert one.steps[: steps // 2] == whole.steps[: steps // 2]
        difference = largest_difference(one, whole)
        one.row["resumed"] = True
        one.row["largest difference"] = difference
        assert difference <= LOSS_BOUND, one.variant.name
        if name == "optimizers" and cell.on_gpu:
            peaks = [max(step["peak_memory_gib"] for step in run.steps) for run in (one, whole)]
            one.row["peak to peak"] = round(peaks[0] / peaks[1], 3)
            assert peaks[0] <= PEAK_BOUND * peaks[1], one.variant.name


def forget_second_half(folder, steps):
    """Leave a finished run as a kill just after its first checkpoint would have left it."""
    shutil.rmtree(folder / f"checkpoint-{steps}")
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= steps // 2]
    metrics.write_text("".join(kept))
    (folder / "status.json").unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()
