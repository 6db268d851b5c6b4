# SPDX-License-Identifier: Apache-2.0
"""Checkpoints as files. Once one is written, there is a complete one at every instant.

    OUTPUT_DIR/checkpoint-STEP/state-00001-of-00004.safetensors
                                              trained weights and optimizer state of one owner,
                                              whole tensors by name; state.safetensors if there is
                                              one owner
                               progress.json  steps done, schedule, arguments of the run, ranks
                               manifest.json  size and hash of the other files
    OUTPUT_DIR/latest                         the name of the newest checkpoint

Tensors are whole, so that a checkpoint does not depend on strategy or number of ranks. Files are
JSON and safetensors, so that nothing is unpickled. Random state and the place in a data set of rows
are not stored, since both are functions of the seed and the step; progress.json has the place in a
stream of documents. A checkpoint is staged, hashed, flushed and renamed; then the pointer is moved,
and only then are old checkpoints deleted. One that replaces a checkpoint of the same step, which
has only the model, is whole before that one is set aside.

These functions only know files, and neither a process group nor an Accelerator.
"""

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from components.exits import Exit
from components.folder import LATEST, MANIFEST
from components.owners import share_out
from components.status import fail, write_file

STATE = "state.safetensors"
STATE_PART = re.compile(r"state(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
PROGRESS = "progress.json"
REPLACED = ".replaced"  # Ends the name of a folder whose checkpoint another one replaces
STAGING = ".staging"  # Ends the name of a checkpoint that is being written
NAME = re.compile(r"checkpoint-([0-9]{1,18})")
# It can only be read by setting it, which is not safe while other threads make files.
UMASK = os.umask(0o077)
os.umask(UMASK)
# What reading a damaged file raises
UNREADABLE = (
    OSError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    RecursionError,
    SafetensorError,
)


# ---- Finding ----
def checkpoints_in(folder: Path) -> dict[int, Path]:
    """Return {step: folder} of all folders that are named as checkpoints, the newest first."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found[int(match[1])] = path
    return dict(sorted(found.items(), reverse=True))


def find_candidates(folder: Path, requested: str) -> list[Path]:
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


def choose_checkpoint(
    folder: Path,
    requested: str,
    damages: Mapping[Path, str | None],
    has_copy: bool = False,
) -> Path | None:
    """Return the checkpoint that a run continues from, or None to start over.

    Damaged checkpoints are passed over with a line on stderr. Ends with 65 if all are damaged, and
    with 64 if checkpoints of later steps would be lost.

    Args:
        requested: --resume_from_checkpoint: auto, none, or a checkpoint's folder.
        damages: {candidate: why it cannot be trusted, or None}, up to the first that can be.
        has_copy: return None if all are damaged, since a copy elsewhere can take their place.
    """
    found = None
    passed_over = []
    for path, damage in damages.items():
        if damage is None:
            found = path
        else:
            print(f"passed over {path}: {damage}", file=sys.stderr, flush=True)
            passed_over.append(path)
    if passed_over and found is None and not has_copy:
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


def step_of(checkpoint: Path) -> int:
    """Return the number of steps done, which the name of a checkpoint's folder has."""
    return int(checkpoint.name.removeprefix("checkpoint-"))


def takes_newest(folder: Path, requested: str) -> bool:
    """Return whether the newest checkpoint of the run's own folder is used if there is one."""
    if requested in ("auto", "none"):
        return requested == "auto"
    return Path(requested).resolve().parent != folder.resolve()


def read_progress(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's progress.json."""
    return json.loads((checkpoint / PROGRESS).read_text())


def sizes_of_state(checkpoint: Path) -> dict[str, int]:
    """Return {file: bytes} of the files of a checkpoint that have the state."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    return {name: manifest[name]["size"] for name in state_files_of(manifest)}


def readers_of_state(checkpoint: Path, num_ranks: int) -> dict[str, int]:
    """Return {file: rank that reads it} of the files of a checkpoint that have the state."""
    return share_out(sizes_of_state(checkpoint), num_ranks)


def read_part(file: Path) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of one file, mapped from it: it is read when a tensor is used."""
    return load_file(file)


def read_state(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of a whole checkpoint, mapped from its files."""
    state = {}
    for name in sizes_of_state(checkpoint):
        state |= read_part(checkpoint / name)
    return state


def state_files(number: int) -> list[str]:
    """Return the names of the files that have the state of a number of owners."""
    if number == 1:
        return [STATE]
    return [f"state-{i:05d}-of-{number:05d}.safetensors" for i in range(1, number + 1)]


def state_files_of(manifest: Mapping[str, Any]) -> list[str]:
    """Return the names of the files with the state.

    Raises:
        ValueError: if one is missing in the manifest.
    """
    names = sorted(name for name in manifest if STATE_PART.fullmatch(name))
    if not names or names != state_files(len(names)):
        raise ValueError("the manifest does not list all parts of the state")
    return names


def find_damage(checkpoint: Path, rank: int = 0, num_ranks: int = 1) -> str | None:
    """Return why a checkpoint cannot be trusted, or None if it can.

    All files must have the size and the hash of the manifest, and be readable.

    Args:
        rank: look only at the files of the state that this rank of `num_ranks` reads, and, on rank
            0, at progress.json.
    """
    written = {}
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        for name in [*state_files_of(manifest), PROGRESS]:
            written[name] = (manifest[name]["size"], manifest[name]["xxh3_128"])
        readers = readers_of_state(checkpoint, num_ranks) | {PROGRESS: 0}
    except UNREADABLE as error:
        return in_words(MANIFEST, error)
    for name in written:
        if readers[name] != rank:
            continue
        damage = find_damage_in_file(checkpoint / name, *written[name])
        if damage is not None:
            return damage
    return None


def find_damage_in_file(file: Path, size: int, written_hash: str) -> str | None:
    """Return why a file of a checkpoint cannot be trusted, or None if it can.

    Args:
        size: in bytes, when the file was written, as is its hash.
    """
    try:
        size_now = file.stat().st_size
        if size_now != size:
            return f"{file.name} has {size_now:,} bytes, not the {size} that were written"
        if size == 0 or hash_of(file) != written_hash:
            return f"{file.name} is not what was written"
        if file.name == PROGRESS:
            read_progress(file.parent)["step"]
        else:
            with safe_open(file, "pt"):
                pass
    except UNREADABLE as error:
        return in_words(file.name, error)
    return None


def in_words(name: str, error: Exception) -> str:
    """Return what is wrong with a file, from the error that reading it raised."""
    if isinstance(error, OSError):
        return f"{name}: {error.strerror}"
    return f"{name} is damaged"


# ---- Tidying, before a run continues ----
def clean_up_after_killed_saves(folder: Path) -> None:
    """Finish what killed saves have begun, or delete it. No save may be under way."""
    finish_replacements(folder)
    for staging in folder.glob(f"checkpoint-*{STAGING}"):
        shutil.rmtree(staging, ignore_errors=True)


def set_damaged_aside(damages: Mapping[Path, str | None]) -> None:
    """Rename damaged checkpoints: the run needs their names when it reaches their steps again.

    Args:
        damages: {checkpoint: why it cannot be trusted, or None}.
    """
    for path, damage in damages.items():
        if damage is not None:
            path.rename(f"{path}.damaged-{time.time_ns()}")


# ---- Writing ----
def make_staging_folder(folder: Path, step: int, nbytes: int) -> None:
    """Make the staging folder of a checkpoint. One process calls it, before the owners write.

    Args:
        nbytes: of the tensors of all owners.

    Raises:
        OSError: if it cannot be made, or if the disk has no room for the tensors.
    """
    staging = staging_folder(folder, step)
    shutil.rmtree(staging, ignore_errors=True)  # left over from a save that was killed
    if nbytes > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    staging.mkdir()


def write_part(file: Path, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Write the tensors of one owner, and return what the manifest says about the file.

    Raises:
        OSError, SafetensorError: if it cannot be written.
    """
    save_file(dict(state), file)
    give_usual_mode(file)
    flush(file)
    return facts_of(file)


def publish(folder: Path, progress: Mapping[str, Any], written: Mapping[str, Any]) -> None:
    """Make a checkpoint of what the owners have written. `delete_old` comes after it.

    It replaces a checkpoint of the same step. One process calls it, after `make_staging_folder` and
    what the owners do.

    Args:
        written: {file: what the manifest says about it} of all owners.

    Raises:
        OSError: if it cannot be written; earlier checkpoints are then unchanged.
    """
    final = folder / f"checkpoint-{progress['step']}"
    staging = staging_folder(folder, progress["step"])
    (staging / PROGRESS).write_text(json.dumps(progress, indent=2))
    manifest = {**written, PROGRESS: facts_of(staging / PROGRESS)}
    (staging / MANIFEST).write_text(json.dumps(manifest, indent=2))
    for path in (staging / PROGRESS, staging / MANIFEST, staging):
        flush(path)
    replace_checkpoint(final, staging)
    flush(folder)  # Before the one that was set aside is deleted
    finish_replacements(folder)
    write_file(folder / LATEST, final.name)
    flush(folder)


def replace_checkpoint(final: Path, staging: Path) -> None:
    """Give a staged checkpoint its name. One that has the name already is set aside.

    Raises:
        OSError: if that fails; the earlier one then has its name again.
    """
    aside = Path(f"{final}{REPLACED}")
    is_replaced = final.exists()
    if is_replaced:
        final.rename(aside)
    try:
        staging.rename(final)
    except OSError:
        if is_replaced:
            aside.rename(final)
        raise


def facts_of(file: Path) -> dict[str, Any]:
    """Return what the manifest says about a file."""
    return {"size": file.stat().st_size, "xxh3_128": hash_of(file)}


def finish_replacements(folder: Path) -> None:
    """Delete the checkpoints that were set aside for others.

    If the run was killed between the two renames, the other one gets its name first: it was whole
    before this one was set aside.
    """
    for aside in folder.glob(f"checkpoint-*{REPLACED}"):
        final = folder / aside.name.removesuffix(REPLACED)
        match = NAME.fullmatch(final.name)
        if match is None:
            continue
        staging = staging_folder(folder, int(match[1]))
        if staging.is_dir() and not final.exists():
            staging.rename(final)
        if final.is_dir():
            shutil.rmtree(aside, ignore_errors=True)


def delete_old(folder: Path, limit: int, kept_steps: Collection[int | None]) -> None:
    """Delete all but the newest `limit` checkpoints and those of `kept_steps`.

    Files that are not ours are kept.
    """
    existing = checkpoints_in(folder)
    ours = [step for step, path in existing.items() if (path / MANIFEST).is_file()]
    for step in ours[limit:]:
        if step in kept_steps:
            continue
        old = existing[step]
        # The manifest goes last: if a deletion is killed, the next one still knows the rest as ours
        for path in [*files_written_to(old), old / MANIFEST]:
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            old.rmdir()


def files_written_to(checkpoint: Path) -> list[Path]:
    """Return the existing files of a checkpoint, and progress.json, without its manifest."""
    parts = [path for path in checkpoint.iterdir() if STATE_PART.fullmatch(path.name)]
    return [*sorted(parts), checkpoint / PROGRESS]


def staging_folder(folder: Path, step: int) -> Path:
    """Return where a checkpoint is written before it gets its name."""
    return folder / f"checkpoint-{step}{STAGING}"


def size_of_state(state: Mapping[str, torch.Tensor]) -> int:
    """Return the number of bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def give_usual_mode(file: Path) -> None:
    """Let others read a file that safetensors has written, as far as the umask lets them.

    safetensors writes into a temporary file, which only its owner may read.
    """
    file.chmod(0o666 & ~UMASK)


def flush(path: Path | str) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def hash_of(path: Path) -> str:
    """Return a file's hash of 128 bits (xxh3), which reveals damage but not forgery."""
    return xxhash.xxh3_128_hexdigest(np.memmap(path, mode="r").data)
