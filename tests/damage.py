# SPDX-License-Identifier: Apache-2.0
"""Damage to checkpoints, in this process, for unit tests.

Each function that damages returns a `Tried`: the number of trials, and the damage that was missed.
"""

import json
import os
import pickle
import random
import shutil
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from core import checkpoint as files
from core.boxes import LocalBox
from core.checkpoint import find_damage, hash_of

MANIFEST = "manifest.json"
STATE_FILES = ("state-00001.safetensors", "state-00002.safetensors")
FILES = (*STATE_FILES, files.BOXES, files.PROGRESS)
NAMES = (*FILES, MANIFEST)
# Folders whose names resemble that of a checkpoint
STRAYS = (
    "checkpoint-",
    "checkpoint--3",
    "checkpoint-8 copy",
    "checkpoint-50.tmp",
    "xcheckpoint-4",
    "checkpoint-٣",
    "checkpoint-0",
)


class Tried(NamedTuple):
    """What was tried: the number of trials, and the damage that was not found."""

    trials: int
    missed: list[str]


# ---- Checkpoints ----


def make_checkpoint(folder: Path, step: int, numbers: int = 3000, limit: int = 9) -> Path:
    """Publish a small checkpoint, as a run would, in place of one of its step. Returns its folder.

    Args:
        numbers: in each of its two tensors.
        limit: the newest checkpoints to keep.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True)
    staging = files.staging_of(folder, step)
    staging.mkdir(parents=True)
    written = []
    tensors = {"weight": torch.full((numbers,), float(step))}
    tensors["state.weight.exp_avg"] = torch.arange(1.0 * numbers)
    for number, (key, tensor) in enumerate(tensors.items(), 1):
        box = LocalBox(key, tuple(tensor.shape), (0,), tensor)
        written.append(files.write(staging, number, [box]))
    files.publish(folder, {"step": step, "arguments": {"seed": 42}}, written)
    files.delete_old(folder, limit, set())
    return folder / f"checkpoint-{step}"


def find_checkpoint(folder: Path, requested: str = "auto") -> Path | None:
    """Return the checkpoint from which a run in this folder resumes; None without a whole one."""
    damages: dict[Path, str] = {}
    for path in files.candidates_in(folder, requested):
        damage = find_damage(path)
        if damage is None:
            files.set_aside(damages)
            return path
        damages[path] = damage
    return None


def is_found(checkpoint: Path, name: str) -> bool:
    """Return whether damage to a file is found, and the file named.

    A wrong hash in the manifest blames the file that it is about.
    """
    problem = find_damage(checkpoint)
    if problem is None:
        return False
    return problem.startswith(name) or name == MANIFEST


def flipped_bits(checkpoint: Path, flips: int, seed: int = 0) -> Tried:
    """Flip one bit at a time, spread over each file."""
    dice = random.Random(seed)
    missed = []
    for i in range(flips):
        path = checkpoint / NAMES[i % len(NAMES)]
        position = dice.randrange(path.stat().st_size)
        bit = dice.randrange(8)
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, position)
            flipped = byte[0] ^ (1 << bit)
            os.pwrite(file.fileno(), bytes([flipped]), position)
            if not is_found(checkpoint, path.name):
                missed.append(f"{path.name}, byte {position}")
            os.pwrite(file.fileno(), byte, position)
    return Tried(flips, missed)


NO_FILE = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
}


def cut_and_lost_files(checkpoint: Path) -> Tried:
    """Cut each file at ten offsets; make it longer, missing, a folder, or a dangling link."""
    trials = 0
    missed = []
    for name in NAMES:
        path = checkpoint / name
        whole = path.read_bytes()
        replacements = dict(NO_FILE)
        for content in (*(whole[: tenth * len(whole) // 10] for tenth in range(10)), whole + b"x"):
            replacements[f"{len(content)} bytes"] = partial(Path.write_bytes, data=content)
        for what, replace in replacements.items():
            path.unlink()
            replace(path)
            trials += 1
            if not is_found(checkpoint, name):
                missed.append(f"{name}: {what}")
            if path.is_dir():
                path.rmdir()
            path.unlink(missing_ok=True)
            path.write_bytes(whole)
    return Tried(trials, missed)


# ---- Folders ----


def older_one_is_taken(folder: Path) -> Tried:
    """Damage each file of the newest checkpoint: the previous one is chosen, this one is kept."""
    missed = []
    for name in NAMES:
        shutil.rmtree(folder, ignore_errors=True)
        older = make_checkpoint(folder, 3)
        newest = make_checkpoint(folder, 7)
        (newest / name).write_bytes(b"")
        if find_checkpoint(folder) != older:
            missed.append(f"{name}: another one")
        kept = list(folder.glob("checkpoint-7.damaged-*"))
        if len(kept) != 1 or newest.exists():
            missed.append(f"{name}: the damaged one is lost")
    return Tried(len(NAMES), missed)


def stray_files(folder: Path) -> Tried:
    """Files, folders and a dangling link that look like a checkpoint are not taken, and stay."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in STRAYS:
        (folder / name).mkdir(parents=True)
        (folder / name / "notes.txt").write_text("mine")
    for name in ("notes.txt", "checkpoint-99", "checkpoint-12345678901234567890"):
        (folder / name).write_text("mine")
    (folder / "checkpoint-77").symlink_to("nowhere")
    before = sorted(folder.rglob("*"))
    for step in (1, 2, 3):
        make_checkpoint(folder, step, limit=1)
    missed = [f"{path} is gone" for path in before if not os.path.lexists(path)]
    if find_checkpoint(folder) != folder / "checkpoint-3":
        missed.append("another one was taken")
    for path in (folder / "checkpoint-1", folder / "checkpoint-2"):
        if path.exists():
            missed.append(f"{path} is left")
    return Tried(len(before), missed)


# ---- Pickles ----


class Planted:
    """An object that runs a command when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def plain_pickle(path: Path, mark: Path) -> None:
    """Write a pickle that makes the file `mark` when it is loaded."""
    path.write_bytes(pickle.dumps({"weight": Planted(f"touch {mark}")}))


def torch_pickle(path: Path, mark: Path) -> None:
    """Write the same, as torch.save writes it."""
    torch.save({"weight": Planted(f"touch {mark}")}, path)


def forge(checkpoint: Path, name: str, mark: Path) -> None:
    """Replace a checkpoint's file by a pickle, with a manifest that matches it."""
    forged = checkpoint / name
    torch_pickle(forged, mark)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest[name] = {"size": forged.stat().st_size, "xxh3_128": hash_of(forged)}
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
