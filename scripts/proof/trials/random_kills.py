# SPDX-License-Identifier: Apache-2.0
"""Whenever all processes of a run are killed, only the steps since its last save are lost."""

import random
import shutil
from functools import partial
from pathlib import Path

from proof.jobs import Run
from proof.trials.lab import Lab
from proof.trials.outcome import last_step, resume_and_compare, unequal, verified
from proof.trials.trial import KILLS, Group, Result, Trial, failed, make_job

KILLS_PER_TRIAL = 5
SAVE_STEPS = {"single": 1, "ddp": 2}


def kill_at_random(
    lab: Lab, folder: Path, job: Run, save_steps: int, kills: int, seed: int
) -> Result:
    """Kill everything (kill -9) at uniformly random moments of a run, then resume it.

    A run that finishes first must be equal to the uninterrupted one, and another is started.
    """
    flags = ("--save_steps", save_steps)
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
    return Result(result.ok and most_lost <= save_steps, most_lost, result.note, kills)


def trials(kills: int = KILLS) -> list[Trial]:
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
            )
            found.append(
                Trial(f"kill -9 of all processes at random, {config}", f"seed {seed}", attempt)
            )
    return found


GROUPS = [Group("random kills", "steps lost", trials)]
