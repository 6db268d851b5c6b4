# SPDX-License-Identifier: Apache-2.0
"""Whenever all processes of a run are killed, only the steps since its last save are lost.

A run that waits for its saves loses at most the steps of one interval between saves: it is killed
before a step's checkpoint is whole, and the one before it is. With --async_save it loses at most
two intervals: one whose checkpoint is still being written, and one after it. The next save begins
only when that checkpoint is whole.
"""

import random
import shutil
from functools import partial
from pathlib import Path

from proof.jobs import Run
from proof.trials.lab import Lab
from proof.trials.outcome import last_step, resume_and_compare, unequal, verified
from proof.trials.trial import KILLS, Group, Result, Trial, failed, make_job

KILLS_PER_TRIAL = 5
SHARE_IN_BACKGROUND = 5  # For so many kills of runs that wait there is one of a run that does not
SAVE_STEPS = {"single": 1, "ddp": 2}


def kill_at_random(
    lab: Lab,
    folder: Path,
    job: Run,
    save_steps: int,
    kills: int,
    seed: int,
    in_background: bool = False,
) -> Result:
    """Kill everything (kill -9) at uniformly random moments of a run, then resume it.

    A run that finishes first must be equal to the uninterrupted one, and another is started.

    Args:
        in_background: whether the run has --async_save.
    """
    flags = ("--save_steps", save_steps, *(("--async_save",) if in_background else ()))
    may_be_lost = 2 * save_steps if in_background else save_steps
    whole = lab.uninterrupted(job)
    seconds = float((whole / "seconds").read_text())
    dice = random.Random(seed)
    most_lost = 0
    kills_left = kills
    has_saved = False
    while kills_left:
        launch = lab.start(job, folder, flags=flags)
        if launch.ends_within(dice.uniform(0, seconds)):
            ended = launch.end()
            if ended.code != 0 or unequal(folder, whole):
                note = f"seed {seed}: {ended.code}, not equal: {ended.tail}"
                return failed(note, most_lost)
            shutil.rmtree(folder)
            has_saved = False
            continue
        launch.kill()
        kills_left -= 1
        has_saved = has_saved or (folder / "latest").exists()
        saved = verified(folder)
        if has_saved and not saved:
            return failed(f"seed {seed}: no checkpoint can be trusted", most_lost)
        most_lost = max(most_lost, last_step(folder) - max(saved, default=0))
    result = resume_and_compare(lab, folder, job, flags=flags)
    return Result(result.ok and most_lost <= may_be_lost, most_lost, result.note, kills)


def of_waiting_runs(kills: int = KILLS) -> list[Trial]:
    """Return trials of runs that wait for their saves."""
    return trials_of(kills, "kill -9 of all processes at random")


def of_saves_in_background(kills: int = KILLS) -> list[Trial]:
    """Return trials of runs with --async_save.

    Args:
        kills: of runs that wait; here there is a fifth of that.
    """
    what = "kill -9 of all processes at random, --async_save"
    return trials_of(kills // SHARE_IN_BACKGROUND, what, in_background=True)


def trials_of(kills: int, what: str, in_background: bool = False) -> list[Trial]:
    """Return trials with three quarters of the kills in one process, the others on two ranks."""
    kills_of = {"single": kills * 3 // 4, "ddp": kills // 4}
    found = []
    for config, number in kills_of.items():
        for seed in range(number // KILLS_PER_TRIAL):
            attempt = partial(
                kill_at_random,
                job=make_job(config),
                save_steps=SAVE_STEPS[config],
                kills=KILLS_PER_TRIAL,
                seed=seed,
                in_background=in_background,
            )
            found.append(Trial(f"{what}, {config}", f"seed {seed}", attempt, KILLS_PER_TRIAL))
    return found


TRIALS = {
    "random kills": of_waiting_runs,
    "random kills, --async_save": of_saves_in_background,
}
GROUPS = [Group(name, "steps lost", trials) for name, trials in TRIALS.items()]
