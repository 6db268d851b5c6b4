# SPDX-License-Identifier: Apache-2.0
"""A loss or a gradient that is not finite changes nothing on any rank, and its rows are named."""

import json
from functools import partial
from pathlib import Path

import numpy as np

from components.shuffling import shuffled
from exits import Exit
from proof.faults import Fault
from proof.jobs import Run
from proof.trials.lab import Ended, Lab
from proof.trials.outcome import equal_to, hash_of_state, nonfinite_weights, verified
from proof.trials.trial import BROKEN, ROWS, STEPS, Group, Result, Trial, failed, make_job

SEED = 42  # the job's seed
ROWS_PER_STEP = 12
ROWS_OF_EVALUATION = 21
ROWS_OF_SECOND_EPOCH = 24  # that the job still reads
STEP = 9  # whose loss or gradient is not finite
FAULTS = ("nan", "inf", "inf gradient")
CONFIGS = (
    "single",
    "ddp",
    "fsdp1_full_shard",
    "fsdp2_full_shard",
    "deepspeed_zero0",
    "deepspeed_zero1",
    "deepspeed_zero2",
    "deepspeed_zero3",
)
SAVE_ALL = ("--save_steps", "1", "--save_total_limit", "30")
POLICIES = {
    "skip": ("--nonfinite", "skip"),
    "stop": ("--nonfinite", "stop"),
    "budget": ("--nonfinite", "skip", "--nonfinite_budget", "0"),
}
# What happens under each policy, as named in the table
DONE = {"skip": "skipped", "stop": "stopped", "budget": "stopped when the budget is used up"}


def row_of_step(step: int) -> int:
    """Return a row (from 1) that only this step of the job has.

    The evaluation rows have numbers too, from 1 to 21, so it is above them.
    """
    first, second = (shuffled(ROWS, (SEED, epoch)).at(np.arange(ROWS)) for epoch in (0, 1))
    end = ROWS_PER_STEP * step
    for row in first[end - ROWS_PER_STEP : end]:
        if row > ROWS_OF_EVALUATION and row not in second[:ROWS_OF_SECOND_EPOCH]:
            return int(row) + 1
    raise ValueError(f"step {step} has no row of its own")


def nothing_changes(lab: Lab, folder: Path, job: Run, do: str, policy: str) -> Result:
    """A batch of one rank gives nan, inf or an infinite gradient in one step.

    Its rows are named, weights and optimizer state stay as they are, and the run continues or ends,
    as its policy says.

    Args:
        do: one of FAULTS.
        policy: a key of POLICIES.
    """
    row = row_of_step(STEP)
    fault = Fault(do, "summed_loss", row=row)
    ended = lab.run(job, folder, [fault], flags=(*SAVE_ALL, *POLICIES[policy]))
    text = (folder / "nonfinite_rows.jsonl").read_text()
    reported = [json.loads(line) for line in text.splitlines()]
    wrong = wrong_names(reported, do, row)
    if policy == "skip":
        wrong += wrong_skip(folder, ended)
    else:
        wrong += wrong_end(folder, ended)
    wrong += nonfinite_weights(folder)[:3]
    return Result(not wrong, len(wrong), "; ".join(wrong))


def wrong_names(reported: list[dict], do: str, row: int) -> list[str]:
    """Return what is wrong with the reported rows, which must be of one micro-batch or step."""
    rows = []
    for of_rank in reported[0]["rows_by_rank"].values():
        rows += of_rank
    wrong = []
    if len(reported) != 1 or reported[0]["step"] != STEP or row not in rows:
        wrong.append(f"reported {reported}, not row {row}")
    what = "gradient" if "gradient" in do else "loss"
    # A loss belongs to one micro-batch; a gradient is only known for the whole step.
    most = 3 if what == "loss" else ROWS_PER_STEP
    if reported[0]["what"] != what or len(rows) > most:
        wrong.append(f"blamed {reported[0]['what']}: {rows}")
    return wrong


def wrong_skip(folder: Path, ended: Ended) -> list[str]:
    """Return what is wrong with a run that must skip the step and finish."""
    wrong = []
    if ended.code != 0:
        wrong.append(f"ended with {ended.code}: {ended.tail}")
    if hash_of_state(folder, STEP) != hash_of_state(folder, STEP - 1):
        wrong.append("weights or optimizer changed")
    if max(verified(folder)) != STEPS:
        wrong.append(f"saved {verified(folder)}")
    return wrong


def wrong_end(folder: Path, ended: Ended) -> list[str]:
    """Return what is wrong with a run that must end at the step, with the state before it saved."""
    wrong = []
    if ended.code != Exit.NOT_FINITE:
        wrong.append(f"ended with {ended.code}: {ended.tail}")
    if max(verified(folder)) != STEP - 1:
        wrong.append(f"saved {verified(folder)}")
    return wrong


def skip_the_first_step(lab: Lab, folder: Path, job: Run) -> Result:
    """The first step is skipped, so that there is nothing to save: saving and stopping do no harm.

    The run is stopped in that step and in a later one, and resumed.
    """
    skip = POLICIES["skip"]
    saving = ("--save_steps", "1", *skip)
    fault = Fault("nan", "summed_loss", row=row_of_step(1))
    whole = folder / "whole"
    resumed = folder / "run"
    ends = [lab.run(job, whole, [fault], flags=("--save_steps", "0", *skip))]
    for step in (1, 3):
        stop = Fault("SIGTERM", "summed_loss", rank=0, step=step)
        ends.append(lab.run(job, resumed, [fault, stop], flags=saving))
    ends.append(lab.run(job, resumed, [fault], flags=saving))
    codes = [ended.code for ended in ends]
    if codes != [0, Exit.STOPPED, Exit.STOPPED, 0]:
        return failed(f"exit codes {codes}: {ends[-1].tail}")
    return equal_to(resumed, whole)


def trials() -> list[Trial]:
    """Return trials of each policy, number and engine, and of the first step under each engine."""
    found = []
    for policy in POLICIES:
        for config in CONFIGS:
            for do in FAULTS:
                job = make_job(config)
                attempt = partial(nothing_changes, job=job, do=do, policy=policy)
                found.append(Trial(DONE[policy], f"{do}, {config}", attempt))
    for config in CONFIGS:
        attempt = partial(skip_the_first_step, job=make_job(config))
        found.append(Trial("skipped before there is anything to save", config, attempt))
    return found


GROUPS = [Group("numbers", BROKEN, trials)]
