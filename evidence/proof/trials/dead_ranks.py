# SPDX-License-Identifier: Apache-2.0
"""If a rank is killed or hangs, or the launcher is killed, all ranks end in seconds and say why."""

import itertools
import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from proof.faults import Fault
from proof.jobs import Run
from proof.trials.lab import TIMEOUT, Lab, Launch
from proof.trials.outcome import resume_and_compare, status_of
from proof.trials.processes import is_gone, ranks_of, state_of
from proof.trials.trial import Group, Result, Trial, make_job

CONFIGS = ("ddp", "fsdp2_full_shard", "deepspeed_zero2")
DDP_TIMEOUT = 10  # seconds after which a rank that hangs is detected
MOST_SECONDS = 5  # after the loss of a rank, or after that time limit


@dataclass(frozen=True)
class Place:
    """Where in a run a rank is lost: in a function, at its n-th call or in a step."""

    at: str
    step: int | None = None
    call: int = 1
    flags: tuple[str, ...] = ()
    is_saving: bool = False  # whether a checkpoint is being written, for SECONDS_OF_WRITE


SECONDS_OF_WRITE = 8
TRAINING = Place("summed_loss", step=7)
PLACES = {
    "training": TRAINING,
    "evaluation": Place("evaluate_perplexity"),
    "saving": Place("write_share"),
    "a save in the background": Place("write_share", flags=("--async_save",)),
    "the step beside a save": Place("summed_loss", 6, flags=("--async_save",), is_saving=True),
}


def kill_a_rank(
    lab: Lab, folder: Path, job: Run, rank: int, place: Place, flags: tuple = ()
) -> Result:
    """kill -9 of one rank: the others end at once, and say which one is gone."""
    faults = [Fault("SIGKILL", place.at, rank=rank, step=place.step, call=place.call)]
    if place.is_saving:
        slow = Fault("wait", "write_share", file=folder / "waits", seconds=SECONDS_OF_WRITE)
        faults.append(slow)
    launch = lab.start(job, folder, faults, (*flags, *place.flags))
    processes = wait_for_loss(launch, job.ranks, rank)
    seconds = seconds_until_gone(processes)
    why = f"rank {rank} (process {processes[rank]}) is gone"
    return ended_with_reason(launch, why, seconds)


def stop_a_rank(lab: Lab, folder: Path, job: Run, rank: int, place: Place) -> Result:
    """SIGSTOP of one rank: after --ddp_timeout all end, and each shows where it was."""
    fault = Fault("SIGSTOP", place.at, rank=rank, step=place.step, call=place.call)
    launch = lab.start(job, folder, [fault], ("--ddp_timeout", str(DDP_TIMEOUT)))
    processes = wait_for_loss(launch, job.ranks, rank)
    seconds = seconds_until_gone(processes) - DDP_TIMEOUT
    why = f"no sign of life for {DDP_TIMEOUT} s"
    return ended_with_reason(launch, why, seconds, stacks=job.ranks)


def kill_the_launcher(
    lab: Lab, folder: Path, job: Run, flags: tuple = (), whole: Path | None = None
) -> Result:
    """kill -9 of the launcher: the ranks save and stop, and the same command continues the run.

    Args:
        whole: the run to compare with, if it is not that of the lab.
    """
    fault = Fault("SIGKILL", "summed_loss", rank=0, step=7, launcher=True)
    launch = lab.start(job, folder, [fault], flags)
    processes = wait_for_ranks(launch, job.ranks)
    while launch.is_running():
        time.sleep(0.01)
    seconds = seconds_until_gone(processes)
    ended = launch.kill()
    status = status_of(folder)
    wrong = ""
    if status["state"] != "stopped":
        wrong = f"after {seconds} s {status}: {ended.output[-2500:]}"
    if "the launcher (process " not in ended.output:
        wrong += f" no rank named the launcher: {ended.output[-2500:]}"
    result = resume_and_compare(lab, folder, job, wrong, flags=flags, whole=whole)
    return Result(result.ok and not wrong, seconds, result.note or wrong)


def wait_for_loss(launch: Launch, ranks: int, lost: int) -> dict[int, int]:
    """Wait until a rank is killed or stopped; return {rank: process id} of all."""
    processes = wait_for_ranks(launch, ranks)
    while launch.is_running() and state_of(processes[lost]) not in "ZTX":
        time.sleep(0.01)
    return processes


def wait_for_ranks(launch: Launch, ranks: int) -> dict[int, int]:
    """Wait until all ranks have started; return {rank: process id}."""
    processes = {}
    while len(processes) < ranks and launch.is_running():
        processes = ranks_of(launch.folder)
        time.sleep(0.05)
    return processes


def seconds_until_gone(processes: dict[int, int]) -> float:
    """Wait until all ranks are gone, and return how long that takes."""
    lost = time.monotonic()
    while time.monotonic() < lost + TIMEOUT:
        if all(is_gone(process) for process in processes.values()):
            break
        time.sleep(0.01)
    return time.monotonic() - lost


def ended_with_reason(launch: Launch, why: str, seconds: float, stacks: int = 0) -> Result:
    """Return the result of a run that has lost a rank: it must fail in time and report the reason.

    Args:
        seconds: after which all ranks were gone.
        stacks: how many ranks must show where they were.
    """
    ended = launch.end()
    status = status_of(launch.folder)
    place = f"{why} on {os.uname().nodename} in step {status['step']}"
    shown = ended.output.count("Current thread 0x")
    ok = (
        ended.code not in (0, None)
        and seconds <= MOST_SECONDS
        and place in ended.output
        and status["state"] == "failed"
        and why in status["why"]
        and (shown == stacks or not stacks)
    )
    note = "" if ok else f"{ended.code}, {shown} stacks, {status}: {ended.output[-2500:]}"
    return Result(ok, seconds, note)


def trials() -> list[Trial]:
    """Return trials that lose each of two and of three ranks in training, evaluation and saving."""
    found = []
    for config, ranks in itertools.product(CONFIGS, (2, 3)):
        job = make_job(config, ranks)
        for rank in range(ranks):
            found += kills_of(job, rank)
        attempt = partial(kill_the_launcher, job=job)
        found.append(Trial("kill -9 of the launcher", f"{config}, {ranks} ranks", attempt))
        for rank in (0, ranks - 1):
            attempt = partial(stop_a_rank, job=job, rank=rank, place=TRAINING)
            detail = f"{config}, rank {rank} of {ranks}"
            found.append(Trial("a stopped rank, after --ddp_timeout", detail, attempt))
    return found


def kills_of(job: Run, rank: int) -> list[Trial]:
    """Return trials that kill one rank in each place."""
    found = []
    detail = f"{job.config}, rank {rank} of {job.ranks}"
    flags = ("--save_steps", "4")
    for name, place in PLACES.items():
        attempt = partial(kill_a_rank, job=job, rank=rank, place=place, flags=flags)
        found.append(Trial(f"kill -9 of a rank in {name}", detail, attempt))
    return found


GROUPS = [Group("dead ranks", "seconds until the other ranks ended", trials)]
