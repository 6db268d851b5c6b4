# SPDX-License-Identifier: Apache-2.0
"""Choose trials, run them, and merge their results with earlier ones."""

import dataclasses
import shutil
import time

from proof.trials.groups import GROUPS
from proof.trials.lab import Lab
from proof.trials.processes import kill_all
from proof.trials.trial import Trial, failed


def line_of(group: str, trial: Trial) -> str:
    """Return a trial as a line of --list."""
    return f"{group}: {trial.what}, {trial.detail}"


def spread(trials: list[Trial], limit: int) -> list[Trial]:
    """Return at most `limit` trials of each `what`, spread evenly from first to last; 0 for all."""
    chosen = []
    for what in dict.fromkeys(trial.what for trial in trials):
        same = [trial for trial in trials if trial.what == what]
        number = min(limit, len(same)) if limit else len(same)
        chosen += [same[place] for place in evenly_spaced(len(same), number)]
    return chosen


def evenly_spaced(length: int, number: int) -> list[int]:
    """Return `number` places in a list: the first, and if there are several also the last.

    Every n-th place instead would only meet byte 0 in a list of four bytes in each of three files.
    """
    if number == 1:
        return [0]
    last, gaps = length - 1, number - 1
    return [place * last // gaps for place in range(number)]


def attempt(lab: Lab, group: str, number: int, trial: Trial) -> dict:
    """Run one trial, print its verdict, and return its entry in the results.

    Its folder is kept if it is not as promised.
    """
    folder = lab.folder / group.replace(" ", "_") / str(number)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    start = time.monotonic()
    try:
        result = trial.attempt(lab, folder)
    except Exception as error:  # Any error, such as a missing file, breaks the promise.
        kill_all(folder)
        result = failed(f"{type(error).__name__}: {error}")
    verdict = "ok" if result.ok else "FAILED"
    facts = f"{time.monotonic() - start:.0f} s, {GROUPS[group].unit}: {result.figure:.3g}"
    print(f"{verdict:>6}  {line_of(group, trial)} ({facts})", flush=True)
    kept = {"what": trial.what, "detail": trial.detail} | dataclasses.asdict(result)
    kept["ok"] = bool(result.ok)
    if result.ok:
        shutil.rmtree(folder)
        return kept | {"note": ""}
    print(result.note, flush=True)
    return kept | {"note": result.note.replace(str(lab.folder), "RUNS")}


def with_earlier(facts: dict, done: list[dict], before: dict, planned: list[Trial]) -> dict:
    """Return the results of a group: new trials, and earlier ones that were not repeated.

    Args:
        facts: date, device, command and versions of the new ones.
        before: earlier results of the group; {} for none.
        planned: all trials that the group has now; others are dropped.
    """
    wanted = {(trial.what, trial.detail) for trial in planned}
    wanted -= {name_of(trial) for trial in done}
    kept = [trial for trial in before.get("trials", []) if name_of(trial) in wanted]
    if not kept:
        return facts | {"trials": done}
    command = f"{before['command']}`, then `{facts['command']}"
    return facts | {"command": command, "trials": kept + done}


def name_of(trial: dict) -> tuple[str, str]:
    """Return the fields that identify a trial within its group."""
    return trial["what"], trial["detail"]
