# SPDX-License-Identifier: Apache-2.0
"""Whatever interrupts a save, there is a checkpoint from which the run resumes exactly.

That holds while the run waits for the save, and with --async_save while it trains.
"""

import re
import shutil
import signal
import subprocess
from functools import partial
from pathlib import Path

from exits import Exit
from proof.faults import Fault
from proof.trials.lab import Lab
from proof.trials.outcome import last_step, resume_and_compare, status_of, verified
from proof.trials.trial import DIFFERENCES, Group, Result, Trial, make_job

# Changes of the file system in one save with one older checkpoint to delete. A trial at one more
# change is not killed, which shows that none is missed.
CHANGES = 26
# The same of the thread that writes: the main thread makes the staging folder.
CHANGES_IN_BACKGROUND = 25
STATE_SIZE = 27_062_484  # bytes of the state file
CHECKPOINT_SIZE = 27_100_000  # bytes of a checkpoint, rounded up
SECOND_SAVE = {"at": "save", "call": 2}
SECOND_WRITE = {"at": "write_share", "call": 2}  # the thread's part of it
THIRD_SAVE = 9  # the step after which a run ends at the latest if its second save has failed
IN_BACKGROUND = ("--async_save",)
SECONDS_OF_WRITE = 8  # A run is killed beside a save that takes as long
# Runs a command with its output folder on a small tmpfs, and keeps what was written there.
ON_SMALL_DISK = (
    'mount -t tmpfs -o size=$1 tmpfs "$2" || exit 99; disk=$2; keep=$3; shift 3; "$@"; code=$?; '
    'rm -f "$disk/filler"; mkdir -p "$keep"; cp -a "$disk/." "$keep"; exit $code'
)


# ---- A save that is interrupted ----


def save_in_danger(
    lab: Lab, folder: Path, fault: Fault, code: int, what: str, more: tuple[str, ...] = ()
) -> Result:
    """A fault in the second save, which is about to replace the only checkpoint.

    Args:
        code: the exit code that the run must have.
        what: named in the note if no checkpoint can be trusted.
        more: flags of the recipe.
    """
    job = make_job()
    flags = ("--save_steps", "3", "--save_total_limit", "1", *more)
    ended = lab.run(job, folder, [fault], flags=flags)
    wrong = ""
    if ended.code != code:
        wrong = f"ended with {ended.code}, not {code}: {ended.tail}"
    if code != 0 and not {3, 6}.intersection(verified(folder)):
        wrong += f" {what}: no checkpoint can be trusted"
    if code == Exit.CANNOT_WRITE and last_step(folder) > THIRD_SAVE:
        wrong += f" {what}: ended after step {last_step(folder)}"
    return resume_and_compare(lab, folder, job, wrong, flags=flags)


def kill_beside_a_save(lab: Lab, folder: Path) -> Result:
    """kill -9 in a step beside which the second checkpoint is written: the first one is there."""
    job = make_job()
    flags = ("--save_steps", "3", *IN_BACKGROUND)
    faults = [
        Fault("wait", **SECOND_WRITE, file=folder / "waits", seconds=SECONDS_OF_WRITE),
        Fault("SIGKILL", "summed_loss", step=8),
    ]
    ended = lab.run(job, folder, faults, flags=flags)
    wrong = ""
    is_staged = (folder / "checkpoint-6.staging").is_dir()
    if ended.code != -signal.SIGKILL or not is_staged or verified(folder) != [3]:
        wrong = f"ended with {ended.code}, {is_staged}, {verified(folder)}: {ended.tail}"
    return resume_and_compare(lab, folder, job, wrong, flags=flags)


def interrupted() -> list[Trial]:
    """Return trials with a kill before each change of a file, and faults in each write."""
    return [*interrupted_while_the_run_waits(), *interrupted_in_background()]


def interrupted_while_the_run_waits() -> list[Trial]:
    """Return the trials of a run that waits until its checkpoint is whole."""
    trials = []
    for change in range(1, CHANGES + 1):
        fault = Fault("crash at change", change=change, **SECOND_SAVE)
        name = f"change {change}"
        attempt = partial(save_in_danger, fault=fault, code=-signal.SIGKILL, what=name)
        trials.append(Trial("crash before each change of the file system", name, attempt))
    fault = Fault("crash at change", change=CHANGES + 1, **SECOND_SAVE)
    attempt = partial(save_in_danger, fault=fault, code=0, what="")
    trials.append(Trial("no change is left out", f"change {CHANGES + 1}", attempt))
    trials += in_writes("crash", -signal.SIGXFSZ)
    trials += in_writes("refuse", Exit.CANNOT_WRITE)
    return trials


def interrupted_in_background() -> list[Trial]:
    """Return the trials of a run that trains while its checkpoint is written."""
    trials = []
    for change in range(1, CHANGES_IN_BACKGROUND + 1):
        fault = Fault("crash at change", change=change, lasting=True, **SECOND_WRITE)
        name = f"change {change}"
        attempt = partial(
            save_in_danger, fault=fault, code=-signal.SIGKILL, what=name, more=IN_BACKGROUND
        )
        what = "crash before each change of the file system, in the background"
        trials.append(Trial(what, name, attempt))
    trials += in_writes("crash", -signal.SIGXFSZ, IN_BACKGROUND)
    trials += in_writes("refuse", Exit.CANNOT_WRITE, IN_BACKGROUND)
    what = "kill -9 in the step beside a save in the background"
    trials.append(Trial(what, "step 8", kill_beside_a_save))
    return trials


def in_writes(do: str, code: int, more: tuple[str, ...] = ()) -> list[Trial]:
    """Return trials with a fault at four places in each file that a save writes.

    Args:
        more: flags of the recipe.
    """
    do_at_byte = f"{do} at byte"
    faults = []
    for quarter in range(4):
        fault = Fault(do_at_byte, byte=STATE_SIZE * quarter // 4, **SECOND_WRITE)
        faults.append(("state.safetensors", fault))
    for byte in (0, 400, 800, 1200):
        fault = Fault(do_at_byte, "save_file", call=2, after=True, byte=byte)
        faults.append(("progress.json", fault))
    for byte in (0, 50, 100, 150):
        faults.append(("manifest.json", Fault(do_at_byte, "hash_of", call=4, byte=byte)))
    trials = []
    for name, fault in faults:
        attempt = partial(save_in_danger, fault=fault, code=code, what=name, more=more)
        detail = f"{name}, byte {fault.byte}"
        what = f"{do} in the middle of a write"
        trials.append(Trial(f"{what}, in the background" if more else what, detail, attempt))
    return trials


# ---- A disk that is full ----


def fill_the_disk(
    lab: Lab, folder: Path, quarter: int | None, more: tuple[str, ...] = ()
) -> Result:
    """On a small disk the second checkpoint does not fit: the run reports it and keeps the first.

    Args:
        quarter: free quarters of a checkpoint's size; None: the disk is too small from the start.
        more: flags of the recipe.
    """
    job = make_job()
    flags = ("--save_steps", "3", "--save_total_limit", "2", *more)
    disk = lab.folder / f"{folder.name}_disk"
    disk.mkdir(exist_ok=True)
    faults = []
    size = CHECKPOINT_SIZE * 3 // 2
    if quarter is not None:
        size = CHECKPOINT_SIZE * 4
        free = CHECKPOINT_SIZE * quarter // 4
        faults = [Fault("fill disk", "save_file", call=2, file=disk / "filler", free=free)]
    before = ["unshare", "-rm", "sh", "-c", ON_SMALL_DISK, "sh", size, disk, folder]
    ended = lab.run(job, disk, faults, flags=flags, before=before)
    reported = re.search(r"it needs ([\d,]+) bytes, ([\d,]+) are free", ended.output)
    wrong = ""
    if not (
        ended.code == Exit.CANNOT_WRITE
        and reported
        and verified(folder) == [3]
        and status_of(folder)["exit_code"] == Exit.CANNOT_WRITE
    ):
        wrong = f"{ended.code}, {verified(folder)}: {ended.tail}"
    return resume_and_compare(lab, folder, job, wrong, flags=flags)


def can_mount() -> bool:
    """Return whether a file system can be mounted here, in a namespace of its own."""
    if not shutil.which("unshare"):
        return False
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return subprocess.run(command, capture_output=True).returncode == 0


def on_full_disks() -> list[Trial]:
    """Return trials on a disk that fills up."""
    trials = []
    for quarter in (None, 0, 1, 2, 3):
        detail = "before the save" if quarter is None else f"{quarter}/4 of the save"
        attempt = partial(fill_the_disk, quarter=quarter)
        trials.append(Trial("the disk is full", detail, attempt))
    for quarter in range(4):
        attempt = partial(fill_the_disk, quarter=quarter, more=IN_BACKGROUND)
        detail = f"{quarter}/4 of the save"
        trials.append(Trial("the disk is full, in the background", detail, attempt))
    return trials


GROUPS = [
    Group("writes", DIFFERENCES, interrupted),
    Group("disk", DIFFERENCES, on_full_disks, is_possible=can_mount),
]
