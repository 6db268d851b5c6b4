# SPDX-License-Identifier: Apache-2.0
"""Runs that lost their second half resume from their checkpoint with the same losses."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from . import launches
from .cell import Outcome, Row, Setup
from .comparisons import add_row, has_failed, largest_difference, row_of
from .launches import Trained, Variant, adapters, job, only_on_gpu

# Relative: kernels sum in no fixed order, and AdamW amplifies the difference over ten steps.
LOSS_BOUND = 2e-3
PEAK_BOUND = 1.1  # peak of a resumed run to that of the run before
FIRST_STATE = 10  # step of the checkpoint that is resumed from
PAGES = "pages between GPU and host"


def engines(setup: Setup) -> Outcome:
    """Resume under every engine."""
    variants = [
        Variant("one process, bf16"),
        Variant("FSDP2", "fsdp2_full_shard"),
        Variant("FSDP2 offload", "fsdp2_cpu_offload"),
        Variant("FSDP1", "fsdp1_full_shard"),
        Variant("ZeRO-0", "deepspeed_zero0"),
        Variant("ZeRO-2", "deepspeed_zero2"),
        Variant("ZeRO-3", "deepspeed_zero3"),
    ]
    return resume_all(setup, variants)


def zero_offload(setup: Setup) -> Outcome:
    """Resume under ZeRO with offload, for which DeepSpeed compiles its CPU optimizer."""
    launches.require_compiler()
    left_out = only_on_gpu(setup, "its optimizer is torch's on a CPU")
    variants = [
        Variant("ZeRO-2 offload", "deepspeed_zero2_offload", left_out=left_out),
        Variant("ZeRO-3 offload", "deepspeed_zero3_offload", left_out=left_out),
    ]
    return resume_all(setup, variants)


def precisions(setup: Setup) -> Outcome:
    """Resume in fp16, with its loss scale, and with a quantized base."""
    on_gpu = only_on_gpu(setup)
    nf4 = adapters(setup, "nf4")
    variants = [
        Variant("nf4 LoRA", flags=nf4),
        Variant("int8 LoRA", flags=adapters(setup, "int8")),
        Variant("fp16", precision="fp16", left_out=on_gpu),
        Variant("FSDP2 fp16", "fsdp2_full_shard", precision="fp16", left_out=on_gpu),
        Variant("nf4 LoRA, FSDP2", "fsdp2_full_shard", flags=nf4),
        Variant("nf4 LoRA, ZeRO-3", "deepspeed_zero3", flags=nf4),
    ]
    return resume_all(setup, variants)


def optimizers(setup: Setup) -> Outcome:
    """Resume with every optimizer; a paged one must stay paged, or the peak would be higher."""
    paged = only_on_gpu(setup, PAGES)
    variants = [
        Variant("adamw_8bit", flags=("--optim", "adamw_8bit")),
        Variant("adamw_torch_fused"),
        Variant("paged_adamw_8bit", flags=("--optim", "paged_adamw_8bit"), left_out=paged),
        Variant("paged_adamw_32bit", flags=("--optim", "paged_adamw_32bit"), left_out=paged),
    ]
    return resume_all(setup, variants, wide=True)


def resume_all(setup: Setup, variants: Sequence[Variant], wide: bool = False) -> Outcome:
    """Run each variant, remove its newest checkpoint, run it again, and compare the losses.

    variants: without the flags of the job. wide: use a model whose state is most of the memory of a
    process, so that peaks can be compared on a GPU; on a CPU peaks are of the whole process.
    """
    steps = 4 if setup.tiny else 2 * FIRST_STATE
    half = steps // 2
    saving = ("--save_steps", str(half), "--save_total_limit", "9")
    jobs = []
    for variant in variants:
        flags = job(setup, *variant.flags, *saving, steps=steps)
        jobs.append(replace(variant, flags=flags))
    data = launches.wide_model(setup) if wide else launches.tiny_model(setup)
    whole = launches.train_all(setup, jobs, data)
    for trained in whole:
        if trained.succeeded:
            forget_second_half(trained.folder / "run", half, steps)
    again = launches.train_all(setup, jobs, data)

    outcome = Outcome(ok=True)
    for first, second in zip(whole, again, strict=True):
        row = row_of(second)
        if first.succeeded and second.succeeded:
            row |= compare_halves(outcome, first, second, half)
            if wide and setup.on_gpu:
                row["peak to peak"] = round(second.peak_gib / first.peak_gib, 3)
                outcome.require(row["peak to peak"] <= PEAK_BOUND)
        outcome.require(not has_failed(first))
        add_row(outcome, row, second)
    return outcome


def compare_halves(outcome: Outcome, first: Trained, second: Trained, half: int) -> Row:
    """Return how a resumed run differs from the uninterrupted run.

    A run that resumed at the checkpoint has not changed earlier lines, including the speed in them.
    """
    resumed = second.steps[:half] == first.steps[:half]
    difference = largest_difference(second.steps, first.steps)
    outcome.require(resumed and difference <= LOSS_BOUND)
    return {
        "resumed": resumed,
        "largest difference": difference,
        "peak GiB before": round(first.peak_gib, 3),
    }


def forget_second_half(folder: Path, half: int, steps: int) -> None:
    """Leave a finished run as a kill just after its first checkpoint would have left it."""
    shutil.rmtree(folder / f"checkpoint-{steps}")
    metrics = folder / "metrics.jsonl"
    kept = []
    for line in metrics.read_text().splitlines():
        if json.loads(line)["step"] <= half:
            kept.append(line + "\n")
    metrics.write_text("".join(kept))
    (folder / "status.json").unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()
