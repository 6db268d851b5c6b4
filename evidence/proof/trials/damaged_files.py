# SPDX-License-Identifier: Apache-2.0
"""Damage to a checkpoint's files is found, and finding it costs little. No run is started."""

from pathlib import Path

from proof import damage
from proof.damage import Tried
from proof.trials.lab import Lab
from proof.trials.trial import Group, Result, Trial

MOST_OF_A_SAVE = 0.1  # share of a save that hashing may take


def flip_bits(lab: Lab, folder: Path) -> Result:
    """A flipped bit anywhere in a checkpoint is found, and its file is named."""
    checkpoint = damage.make_checkpoint(folder, 5)
    return all_found(damage.flipped_bits(checkpoint, 1000))


def cut_and_lose_files(lab: Lab, folder: Path) -> Result:
    """A file that is truncated, longer, missing or replaced is found."""
    checkpoint = damage.make_checkpoint(folder, 5)
    return all_found(damage.cut_and_lost_files(checkpoint))


def change_manifests(lab: Lab, folder: Path) -> Result:
    """No randomly changed manifest is trusted, and none raises."""
    checkpoint = damage.make_checkpoint(folder, 5)
    return all_found(damage.mutated_manifests(checkpoint, 10_000))


def damage_the_newest(lab: Lab, folder: Path) -> Result:
    """The checkpoint before a damaged one is chosen."""
    return all_found(damage.older_one_is_taken(folder))


def leave_strays(lab: Lab, folder: Path) -> Result:
    """Foreign files and folders stay and are not taken for checkpoints."""
    return all_found(damage.stray_files(folder))


def all_found(tried: Tried) -> Result:
    """Return the result of damage that must not be missed."""
    missed = tried.missed
    return Result(not missed, len(missed), "; ".join(missed[:5]), tried.trials)


def share_of_hashing(lab: Lab, folder: Path) -> Result:
    """Hashing takes at most a tenth of a save of 400 MB; the median of five saves."""
    shares = sorted(damage.share_of_hashing(folder, 100_000_000) for _ in range(5))
    median = shares[2]
    return Result(median <= MOST_OF_A_SAVE, median)


def damaged() -> list[Trial]:
    """Return the trials that damage bits, files, manifests and folders."""
    return [
        Trial("a flipped bit is found, the file named", "all files", flip_bits),
        Trial("cut, empty, missing or foreign files are found", "", cut_and_lose_files),
        Trial("changed manifests never trusted, none raises", "", change_manifests),
        Trial("the checkpoint before a damaged one is taken", "", damage_the_newest),
        Trial("foreign files stay and are not taken", "", leave_strays),
    ]


def hashed() -> list[Trial]:
    """Return the trial that measures the cost of hashing."""
    return [Trial("at most a tenth of a save", "400 MB", share_of_hashing)]


GROUPS = [
    Group("hashing", "share of the time of a save", hashed),
    Group("damage", "missed", damaged),
]
