# SPDX-License-Identifier: Apache-2.0
"""A signal at any moment, to any process of a run: the run stops, saves, and resumes exactly."""

import os
import signal
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from exits import Exit
from proof.faults import Fault
from proof.jobs import Run
from proof.trials.lab import Ended, Lab
from proof.trials.outcome import last_line, resume_and_compare, status_of, verified
from proof.trials.processes import processes_of
from proof.trials.trial import DIFFERENCES, EPOCH, Group, Result, Trial, make_job

SIGNALS = ("SIGTERM", "SIGUSR1")
SIGNALS_TO_GROUPS = (*SIGNALS, "SIGINT")
GRACE = 30  # seconds that torchrun gives its ranks
LAST_WORDS = ("again to continue", "command again")  # how the last line of a stopped run ends


@dataclass(frozen=True)
class Place:
    """Where in a run a signal arrives."""

    at: str  # the function
    saved: int  # the step after which the run is saved, 0 for none
    step: int | None = None
    flags: tuple[str, ...] = ()


IN_BACKGROUND = ("--save_steps", "5", "--async_save")
PLACES = {
    "data preparation": Place("load_data", saved=0),
    "the first step": Place("summed_loss", saved=1, step=1),
    "training": Place("summed_loss", saved=7, step=7),
    "evaluation": Place("evaluate_perplexity", saved=EPOCH),
    "saving": Place("gather_state", saved=6, flags=("--save_steps", "5")),
    "saving in the background": Place("gather_state", saved=6, flags=IN_BACKGROUND),
    "the step beside a save": Place("summed_loss", saved=6, step=6, flags=IN_BACKGROUND),
}


# ---- One signal ----


def stop_by_signal(
    lab: Lab,
    folder: Path,
    job: Run,
    name: str,
    rank: int | None,
    place: str,
    whole: Path | None = None,
) -> Result:
    """A signal to one rank, or to all: the run stops, saves, prints how to resume, and resumes.

    Args:
        place: a key of PLACES.
        whole: the run to compare with, if it is not the lab's.
    """
    at = PLACES[place]
    fault = Fault(name, at.at, rank=rank, step=at.step)
    ended = lab.run(job, folder, [fault], flags=at.flags)
    status = status_of(folder)
    last = last_line(ended.output)
    wrong = ""
    if not (
        ended.code == Exit.STOPPED
        and status["state"] == "stopped"
        and last.endswith(LAST_WORDS)
        and max(verified(folder), default=0) == at.saved
    ):
        wrong = f"code {ended.code}, {status}, last line {last}, saved {verified(folder)}"
    return resume_and_compare(lab, folder, job, wrong, flags=at.flags, whole=whole)


def stop_a_rank_that_waits(lab: Lab, folder: Path, name: str) -> Result:
    """While rank 0 prepares data, the rank that waits for it (in C++) receives a signal."""
    job = make_job("ddp")
    mark = lab.folder / f"{folder.name}_waits"
    fault = Fault("wait", "load_data", rank=0, file=mark, seconds=60)
    launch = lab.start(job, folder, [fault])
    launch.wait_for_file(mark)
    time.sleep(5)
    sent = time.monotonic()
    for process, rank in processes_of(folder).items():
        if rank == 1:
            os.kill(process, getattr(signal, name))
    ended = launch.end()
    seconds = time.monotonic() - sent
    wrong = ""
    if not is_stopped(ended, folder) or seconds >= GRACE:
        wrong = f"{ended.code} after {seconds:.0f} s: {ended.tail}"
    return resume_and_compare(lab, folder, job, wrong)


def is_stopped(ended: Ended, folder: Path) -> bool:
    """Return whether a run ended as stopped, and recorded it."""
    return ended.code == Exit.STOPPED and status_of(folder)["state"] == "stopped"


def stop_a_group_that_tokenizes(lab: Lab, folder: Path, name: str) -> Result:
    """A signal to a process and the two that tokenize its rows.

    One of them has finished its share and holds a lock.
    """
    job = make_job("single")
    mark = lab.folder / f"{folder.name}_tokenizes"
    fault = Fault("wait", "row_to_conversation", file=mark, seconds=20)
    # With the cache of other runs nothing would be left to tokenize.
    cache = {"HF_DATASETS_CACHE": str(lab.folder / f"{folder.name}_cache")}
    flags = ("--dataset_num_proc", "2")
    launch = lab.start(job, folder, [fault], flags, environment=cache)
    launch.wait_for_file(mark)
    time.sleep(2)  # until the other process has finished
    os.killpg(launch.process.pid, getattr(signal, name))
    ended = launch.end()
    wrong = ""
    if not is_stopped(ended, folder) or "error:" in ended.output:
        wrong = f"{ended.code}: {ended.tail}"
    return resume_and_compare(lab, folder, job, wrong)


def stop_a_group_with_loaders(lab: Lab, folder: Path, job: Run, name: str) -> Result:
    """A signal to all processes of a rank's group, including its data loader workers."""
    flags = ("--dataloader_num_workers", "1")
    fault = Fault(name, "summed_loss", rank=0, step=7, group=True)
    ended = lab.run(job, folder, [fault], flags=flags)
    wrong = ""
    if ended.code != Exit.STOPPED or verified(folder) != [7]:
        wrong = f"{ended.code}: {ended.tail}"
    return resume_and_compare(lab, folder, job, wrong, flags=flags)


def of_every_kind() -> list[Trial]:
    """Return trials of every signal in every place under DDP, and of one in four elsewhere."""
    trials = []
    number = 0
    for config in ("ddp", "fsdp2_full_shard", "deepspeed_zero3"):
        for name in SIGNALS:
            for rank in (None, 0, 1):
                for place in PLACES:
                    if config == "ddp" or number % 4 == 0:
                        trials.append(one_signal(config, name, rank, place))
                    number += 1
    for config in ("single", "ddp"):
        for name in SIGNALS_TO_GROUPS:
            attempt = partial(stop_a_group_with_loaders, job=make_job(config), name=name)
            trials.append(
                Trial(f"{name} to a process group with data loader workers", config, attempt)
            )
    for name in SIGNALS_TO_GROUPS:
        attempt = partial(stop_a_group_that_tokenizes, name=name)
        detail = "single, two processes that tokenize"
        trials.append(Trial(f"{name} in data preparation", detail, attempt))
    attempt = partial(stop_a_rank_that_waits, name="SIGTERM")
    trials.append(Trial("SIGTERM in data preparation", "ddp, a rank that waits", attempt))
    return trials


def one_signal(config: str, name: str, rank: int | None, place: str) -> Trial:
    """Return the trial of one signal to one rank, or to all."""
    to = "all ranks" if rank is None else f"only rank {rank}"
    attempt = partial(stop_by_signal, job=make_job(config), name=name, rank=rank, place=place)
    return Trial(f"{name} in {place}", f"{config}, {to}", attempt)


# ---- A signal, and something else after it ----


def kill_while_saving(
    lab: Lab, folder: Path, config: str, change: int, in_background: bool = False
) -> Result:
    """A second signal while the checkpoint of the first one is saved, and then kill -9.

    Args:
        change: number of the change of the file system before which the run is killed.
        in_background: whether checkpoints are written in the background.
    """
    job = make_job(config)
    flags = ("--save_steps", "3", *(("--async_save",) if in_background else ()))
    at = "write_share" if in_background else "save"
    faults = [
        Fault("SIGTERM", "summed_loss", rank=0, step=8),
        Fault("SIGTERM", at, rank=0, call=3),
        Fault("crash at change", at, rank=0, call=3, change=change, lasting=in_background),
    ]
    ended = lab.run(job, folder, faults, flags=flags)
    wrong = ""
    if not is_killed(ended) or status_of(folder)["state"] == "stopped" or 6 not in verified(folder):
        wrong = f"code {ended.code}, {verified(folder)}"
    return resume_and_compare(lab, folder, job, wrong, flags=flags)


def is_killed(ended: Ended) -> bool:
    """Return whether a run neither finished nor stopped."""
    return ended.code not in (0, Exit.STOPPED)


def kill_after_evaluation(lab: Lab, folder: Path, config: str) -> Result:
    """A run that is stopped in an evaluation, resumed, and killed after it evaluates once."""
    job = make_job(config)
    stopped = lab.run(job, folder, [Fault("SIGTERM", "evaluate_perplexity", rank=0)])
    killed = lab.run(job, folder, [Fault("SIGKILL", "summed_loss", rank=0, step=20)])
    wrong = ""
    if stopped.code != Exit.STOPPED or not is_killed(killed):
        wrong = f"{stopped.code}, {killed.code}"
    return resume_and_compare(lab, folder, job, wrong)


def followed_by_a_kill() -> list[Trial]:
    """Return trials with a kill -9 during or after the handling of a signal."""
    trials = []
    for config in ("single", "ddp"):
        for change in (1, 3, 8, 15):
            attempt = partial(kill_while_saving, config=config, change=change)
            detail = f"{config}, change {change} of the save"
            trials.append(Trial("two signals, then kill -9", detail, attempt))
        for change in (1, 8):
            attempt = partial(kill_while_saving, config=config, change=change, in_background=True)
            detail = f"{config}, change {change} in the background"
            trials.append(Trial("two signals, then kill -9, --async_save", detail, attempt))
    for config in ("single", "ddp"):
        attempt = partial(kill_after_evaluation, config=config)
        what = "a signal in an evaluation, then kill -9 after it"
        trials.append(Trial(what, config, attempt))
    return trials


GROUPS = [
    Group("signals", DIFFERENCES, of_every_kind),
    Group("twice", DIFFERENCES, followed_by_a_kill),
]
