# SPDX-License-Identifier: Apache-2.0
"""From which checkpoint a run continues, of those in its folder and in its object store.

Rank 0 decides it, in two calls between which all ranks verify the candidates. A dry run asks the
same, but changes nothing, and looks into no store.
"""

from collections.abc import Mapping
from pathlib import Path

from components import checkpoint
from components.exits import Exit
from components.object_store import ObjectStore
from components.status import fail


def find_candidates(
    folder: Path, store: ObjectStore | None, requested: str, dry_run: bool
) -> list[Path]:
    """Return the checkpoints to try, in order, in a tidy folder.

    Args:
        store: that of the run, from which a checkpoint that is further is fetched.
        requested: --resume_from_checkpoint: auto, none, or a checkpoint's folder.
    """
    if not dry_run:
        checkpoint.clean_up_after_killed_saves(folder)
        if store is not None:
            store.bring_newest(requested)
    return checkpoint.find_candidates(folder, requested)


def choose_checkpoint(
    folder: Path,
    store: ObjectStore | None,
    requested: str,
    dry_run: bool,
    damages: Mapping[Path, str | None],
) -> Path | None:
    """Return the checkpoint to continue from, or None to start over.

    Damaged ones are set aside. Ends with 65 if all are damaged, and with 64 if checkpoints of later
    steps would be lost.

    Args:
        store, requested, dry_run: as for `find_candidates`.
        damages: {candidate: why it cannot be trusted, or None}, up to the first that can be.
    """
    if dry_run:
        return checkpoint.choose_checkpoint(folder, requested, damages)
    all_damaged = bool(damages) and None not in damages.values()
    has_copy = all_damaged and store is not None and store.has_one_for(requested)
    found = checkpoint.choose_checkpoint(folder, requested, damages, has_copy)
    checkpoint.set_damaged_aside(damages)
    if store is None:
        return found
    found = store.bring_if_further(requested, found)
    if found is None and all_damaged:
        fail(
            Exit.DATA,
            f"--output_dir {folder}: all checkpoints there and in {store.url} are damaged: delete "
            "those of the store to start over",
        )
    return found
