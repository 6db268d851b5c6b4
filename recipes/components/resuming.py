# SPDX-License-Identifier: Apache-2.0
"""From which checkpoint a run continues, of those in its folder.

Rank 0 decides it, in two calls between which all ranks verify the candidates. A dry run asks the
same, but changes nothing.
"""

import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from components.folder import MANIFEST, takes_newest
from components.long_calls import call_on_every_rank
from core import checkpoint
from core.checkpoint import checkpoints_in, read_progress
from core.exits import End, Exit, fail
from core.stop import HOST

SECONDS_FOR_FILE = 10


def find_candidates(folder: Path, requested: str, dry_run: bool) -> list[Path]:
    """Return the checkpoints to try, in order, in a tidy folder.

    Args:
        requested: --resume_from_checkpoint: auto, none, or a checkpoint's folder.
    """
    if not dry_run:
        for staging in folder.glob(f"checkpoint-*{checkpoint.STAGING}"):
            shutil.rmtree(staging, ignore_errors=True)  # A save was killed
    return checkpoints_to_try(folder, requested)


def choose_checkpoint(
    folder: Path,
    requested: str,
    dry_run: bool,
    damages: Mapping[Path, str | None],
) -> Path | None:
    """Return the checkpoint to continue from, or None to start over.

    Damaged ones are set aside. Ends with 65 if all are damaged, and with 64 if checkpoints of later
    steps would be lost.

    Args:
        requested, dry_run: as for `find_candidates`.
        damages: {candidate: why it cannot be trusted, or None}, up to the first that can be.
    """
    found = take_newest_whole(folder, requested, damages)
    if not dry_run:
        checkpoint.set_aside(damages)
    return found


def checkpoints_to_try(folder: Path, requested: str) -> list[Path]:
    """Return the checkpoints to try, in order.

    Args:
        requested: as for `choose_checkpoint`.
    """
    existing = checkpoints_in(folder)
    if requested == "auto":
        return list(existing.values())
    if requested == "none":
        return []
    given = Path(requested)
    if not takes_newest(folder, requested):
        return [given]
    # The run begins from another folder's checkpoint, but may have written its own since
    return [*existing.values(), given]


def take_newest_whole(
    folder: Path,
    requested: str,
    damages: Mapping[Path, str | None],
) -> Path | None:
    """Return the checkpoint that a run continues from, or None to start over.

    Damaged checkpoints are passed over with a line on stderr. Ends with 65 if all are damaged, and
    with 64 if checkpoints of later steps would be lost.

    Args:
        requested: --resume_from_checkpoint: auto, none, or a checkpoint's folder.
        damages: {candidate: why it cannot be trusted, or None}, up to the first that can be.
    """
    found = None
    passed_over = []
    for path, damage in damages.items():
        if damage is None:
            found = path
        else:
            print(f"passed over {path}: {damage}", file=sys.stderr, flush=True)
            passed_over.append(path)
    if passed_over and found is None:
        fail(
            Exit.DATA,
            "no checkpoint can be trusted: choose another --output_dir to start over, or move "
            f"{passed_over[0]} away",
        )
    step = read_progress(found)["step"] if found else 0
    existing = checkpoints_in(folder)
    later = [
        number for number, path in existing.items() if number > step and path not in passed_over
    ]
    if requested != "auto" and later:
        fail(
            Exit.USAGE,
            f"--resume_from_checkpoint {requested}: {folder} has checkpoint-{max(existing)} of a "
            "run that went further: continue from that with auto, choose another --output_dir, or "
            "move it away",
        )
    return found


# ---- What all ranks verify ----
def verify_candidates(
    accelerator: Accelerator, candidates: Sequence[Path]
) -> dict[Path, str | None]:
    """Return {checkpoint: why it cannot be trusted, or None}, up to the first that can be.

    Every rank takes part. All ranks end with 64 if a host does not see a checkpoint of rank 0's.

    Args:
        candidates: the same on every rank, in the order in which they are tried.
    """
    found: dict[Path, str | None] = {}
    for path in candidates:
        require_on_every_host(accelerator, path)
        found[path] = verify_together(accelerator, path)
        if found[path] is None:
            break
    return found


def verify_together(accelerator: Accelerator, path: Path) -> str | None:
    """Return why a checkpoint cannot be trusted, or None. Each rank looks at what it reads."""
    rank, num_ranks = accelerator.process_index, accelerator.num_processes
    look = partial(checkpoint.find_damage, path, rank, num_ranks)
    damages = call_on_every_rank(accelerator, look)
    return next((damage for damage in damages if damage is not None), None)


def require_on_every_host(accelerator: Accelerator, path: Path) -> None:
    """End all ranks with 64 if rank 0 sees a checkpoint's manifest and another host does not."""
    manifest = path / MANIFEST
    if not broadcast_object_list([manifest.is_file()])[0]:
        return
    # A network file system may show a new file to other hosts some seconds later
    until = time.monotonic() + SECONDS_FOR_FILE
    while not manifest.exists() and time.monotonic() < until:
        time.sleep(0.2)
    seen = gather_object([(HOST, manifest.exists())])
    missing = [host for host, is_there in seen if not is_there]
    if missing:
        raise End(
            Exit.USAGE,
            f"{path} is not on {missing[0]}: --output_dir must be on a file system that all hosts "
            "share",
        )
