# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped by a signal and resumed ends as an uninterrupted one."""

import itertools
from functools import partial
from pathlib import Path

from exits import Exit
from proof.faults import Fault
from proof.jobs import Run, configs
from proof.trials.lab import Lab
from proof.trials.outcome import equal_to
from proof.trials.trial import (
    DIFFERENCES,
    IN_EACH_STEP,
    STEPS,
    Group,
    Result,
    Trial,
    failed,
    jobs_on_meshes,
    make_job,
)

QUANTIZED_CONFIGS = ["single", "fsdp2_full_shard", "deepspeed_zero3"]
FIVE_STEPS = (2, 5, 9, 12, 16)  # steps of one epoch


def stop_and_resume(
    lab: Lab, folder: Path, job: Run, steps: tuple[int, ...], at: str = "summed_loss"
) -> Result:
    """SIGTERM to the last rank in each of these steps: the run stops, saves, resumes exactly.

    Args:
        at: the function in which it gets the signal, as a Fault names it.
    """
    whole = lab.uninterrupted(job)
    last_rank = job.ranks - 1
    faults = [Fault("SIGTERM", at, rank=last_rank, step=step) for step in steps]
    ends = lab.run_until_done(job, folder, faults)
    codes = [ended.code for ended in ends]
    if codes != [Exit.STOPPED] * len(steps) + [0]:
        return failed(f"exit codes {codes}: {ends[-1].tail}")
    return equal_to(folder, whole)


def under_every_yaml() -> list[Trial]:
    """Return trials that stop once under every YAML and kind of weights, in varying steps.

    Under meshes all weights are trained.
    """
    kinds = {
        "full": configs(),
        "LoRA": [name for name in configs() if name != "fsdp1_no_shard"],
        "nf4 LoRA": QUANTIZED_CONFIGS,
    }
    jobs = []
    for weights, names in kinds.items():
        jobs += [make_job(name, 2, weights) for name in names]
    # Three ranks, over which weights are split into parts of different sizes. Under DDP the order
    # in which three gradients are added depends on their place in a bucket.
    jobs += [make_job(name, 3) for name in ("deepspeed_zero3", "fsdp2_full_shard", "ddp")]
    trials = []
    for one, step in zip(jobs, itertools.cycle(range(1, 20, 3)), strict=False):
        attempt = partial(stop_and_resume, job=one, steps=(step,))
        what = f"stopped and continued, {one.weights}"
        trials.append(Trial(what, f"{one.name}, step {step}", attempt))
    for one, step in zip(jobs_on_meshes(), itertools.cycle(range(2, 20, 3)), strict=False):
        attempt = partial(stop_and_resume, job=one, steps=(step,), at=IN_EACH_STEP)
        trials.append(Trial("stopped and continued, meshes", f"{one.name}, step {step}", attempt))
    return trials


def in_every_step() -> list[Trial]:
    """Return trials that stop in every step of one process, and in every third on two ranks."""
    steps_of = {
        "single": range(1, STEPS),
        "ddp": range(1, STEPS, 3),
        "fsdp2_full_shard": range(2, STEPS, 3),
    }
    trials = []
    for config, steps in steps_of.items():
        for step in steps:
            attempt = partial(stop_and_resume, job=make_job(config), steps=(step,))
            trials.append(Trial(f"stopped in each step, {config}", f"step {step}", attempt))
    return trials


def five_times() -> list[Trial]:
    """Return trials that stop five times in one epoch."""
    trials = []
    for config in ("single", "ddp", "deepspeed_zero2"):
        attempt = partial(stop_and_resume, job=make_job(config), steps=FIVE_STEPS)
        trials.append(Trial("five interruptions in one epoch", config, attempt))
    return trials


GROUPS = [
    Group("resume", DIFFERENCES, under_every_yaml),
    Group("every step", DIFFERENCES, in_every_step),
    Group("five", DIFFERENCES, five_times),
]
