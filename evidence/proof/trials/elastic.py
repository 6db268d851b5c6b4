# SPDX-License-Identifier: Apache-2.0
"""A run may resume on other numbers of ranks and under other strategies, with the same loss."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from exits import Exit
from proof.faults import Fault
from proof.jobs import Run, reference_of, run_on_mesh
from proof.trials.lab import Lab
from proof.trials.outcome import difference_in_loss
from proof.trials.trial import (
    EPOCH,
    IN_EACH_STEP,
    LOSS,
    ROWS,
    Group,
    Result,
    Trial,
    failed,
    jobs_on_meshes,
    make_job,
)

MOST_DIFFERENCE = 1e-4  # relative, in the loss of a step: sums in another order, over 20 steps
ELASTIC_CONFIGS = (
    "ddp",
    "fsdp2_full_shard",
    "fsdp1_full_shard",
    "deepspeed_zero2",
    "deepspeed_zero3",
)
NUMBERS_OF_RANKS = ([1, 2, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3])
STRATEGIES = [
    "single",
    "ddp",
    "fsdp1_full_shard",
    "deepspeed_zero3",
    "fsdp2_full_shard",
    "deepspeed_zero1",
    "fsdp1_shard_grad_op",
    "deepspeed_zero2",
    "fsdp2_shard_grad_op",
    "deepspeed_zero0",
    "fsdp1_no_shard",
]
# What the refusal of another number of rows per step must contain
REFUSAL = ("12 rows", "--per_device_train_batch_size", "--gradient_accumulation_steps")


def resume_elsewhere(lab: Lab, folder: Path, jobs: Sequence[Run], stops: Sequence[int]) -> Result:
    """Stop in these steps, resume as another job each time: each row once, and the same loss."""
    faults = [Fault("SIGTERM", "summed_loss", rank=0, step=step) for step in stops]
    faults.append(Fault("record rows", "summed_loss", file=folder / "rows"))
    whole = lab.uninterrupted(make_job("single"))
    wrong = run_in_turn(lab, folder, jobs, faults)
    if wrong:
        return failed(wrong)
    worst = difference_in_loss(folder, whole)
    if rows_of_first_epoch(folder) != list(range(1, ROWS + 1)):
        return failed("not each row exactly once", worst)
    return Result(worst <= MOST_DIFFERENCE, worst)


def run_in_turn(lab: Lab, folder: Path, jobs: Sequence[Run], faults: Sequence[Fault]) -> str:
    """Run each job until it stops, and the last one to the end.

    Returns:
        How a job ended that did not end so; "" if there is none.
    """
    for number, job in enumerate(jobs, start=1):
        ended = lab.run(job, folder, faults)
        expected = 0 if number == len(jobs) else Exit.STOPPED
        if ended.code != expected:
            return f"{job.name} ended with {ended.code}: {ended.tail}"
    return ""


def change_mesh(lab: Lab, folder: Path, jobs: Sequence[Run]) -> Result:
    """Stop in each step and resume as the next job, under another mesh: the same loss."""
    whole = lab.uninterrupted(reference_of(jobs[0]))
    stops = range(1, len(jobs))
    faults = [Fault("SIGTERM", IN_EACH_STEP, rank=0, step=step) for step in stops]
    wrong = run_in_turn(lab, folder, jobs, faults)
    if wrong:
        return failed(wrong)
    worst = difference_in_loss(folder, whole)
    return Result(worst <= MOST_DIFFERENCE, worst)


def rows_of_first_epoch(folder: Path) -> list[int]:
    """Return the rows that ranks recorded in the first epoch, sorted; padding has number 0."""
    rows = []
    for path in folder.glob("rows.*"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["step"] <= EPOCH:
                rows += [row for row in record["rows"] if row]
    return sorted(rows)


def refuse_other_rows(lab: Lab, folder: Path, config: str) -> Result:
    """Another number of rows per step is refused, and the flags that fit are named."""
    lab.run(make_job("single"), folder, [Fault("SIGTERM", "summed_loss", step=2)])
    ended = lab.run(replace(make_job(config), batch=5, accumulation=1), folder)
    if ended.code == Exit.USAGE and all(word in ended.output for word in REFUSAL):
        return Result(True)
    return failed(f"{ended.code}: {ended.tail}")


def on_other_ranks() -> list[Trial]:
    """Return trials that resume on other numbers of ranks or with other rows per step."""
    trials = []
    for config in ELASTIC_CONFIGS:
        for order in NUMBERS_OF_RANKS:
            jobs = [make_job(config, ranks) if ranks > 1 else make_job("single") for ranks in order]
            attempt = partial(resume_elsewhere, jobs=jobs, stops=[5, 10, 15])
            trials.append(Trial("other numbers of ranks", f"{config} {order}", attempt))
        attempt = partial(refuse_other_rows, config=config)
        trials.append(Trial("a different global batch size is refused", config, attempt))
    return trials


def under_other_strategies() -> list[Trial]:
    """Return trials that change the strategy every two steps, in three orders."""
    trials = []
    for first in (0, 4, 8):
        turn = STRATEGIES[first:] + STRATEGIES[:first]
        jobs = [make_job(config) for config in turn]
        attempt = partial(resume_elsewhere, jobs=jobs, stops=range(2, 21, 2))
        trials.append(Trial("another strategy every 2 steps", " > ".join(turn), attempt))
    return [*trials, *under_other_meshes()]


def under_other_meshes() -> list[Trial]:
    """Return a trial for each tiny model, from mesh to mesh with FSDP2 between any two."""
    turns: dict[str, list[Run]] = {}
    for job in jobs_on_meshes():
        turn = turns.setdefault(job.tiny, [reference_of(job)])
        fsdp = run_on_mesh("fsdp2_full_shard", 2, recipe=job.model)
        turn += [job, replace(fsdp, layers=job.layers)]
    trials = []
    for turn in turns.values():
        detail = " > ".join(job.config for job in turn)
        attempt = partial(change_mesh, jobs=turn)
        trials.append(Trial("another mesh in each step", detail, attempt))
    return trials


GROUPS = [
    Group("elastic", LOSS, on_other_ranks),
    Group("strategies", LOSS, under_other_strategies),
]
