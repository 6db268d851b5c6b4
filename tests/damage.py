# SPDX-License-Identifier: Apache-2.0
"""Damage to checkpoints, in this process, for trials and unit tests.

Each function that damages returns a `Tried`: the number of trials, and the damage that was missed.
"""

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from core import checkpoint as files
from core.boxes import LocalBox
from core.checkpoint import find_damage, hash_of

MANIFEST = "manifest.json"
# What `make_checkpoint` writes
STATE_FILES = ("state-00001.safetensors", "state-00002.safetensors")
FILES = (*STATE_FILES, files.BOXES, files.PROGRESS)
NAMES = (*FILES, MANIFEST)
# Folders whose names resemble that of a checkpoint
STRAYS = (
    "checkpoint-",
    "checkpoint-abc",
    "checkpoint-1.5",
    "checkpoint--3",
    "checkpoint-8 copy",
    "my notes",
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


def make_checkpoint(
    folder: Path, step: int, numbers: int = 3000, limit: int = 9, **progress: Any
) -> Path:
    """Publish a small checkpoint, as a run would, in place of one of its step. Returns its folder.

    Args:
        numbers: in each of its two tensors.
        limit: the newest checkpoints to keep.
        progress: what its progress.json has beside the step and arguments.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(folder / f"checkpoint-{step}", ignore_errors=True)
    shares = [
        {"weight": torch.full((numbers,), float(step))},
        {"state.weight.exp_avg": torch.arange(1.0 * numbers)},
    ]
    publish(folder, shares, {"step": step, "arguments": {"seed": 42}, **progress}, limit)
    return folder / f"checkpoint-{step}"


def publish(
    folder: Path,
    shares: Sequence[dict[str, torch.Tensor]],
    progress: dict[str, Any],
    limit: int,
    kept_step: int | None = None,
) -> None:
    """Write a checkpoint in this process, as its owners do together.

    Args:
        shares: the tensors of each owner.
    """
    staging = files.staging_of(folder, progress["step"])
    staging.mkdir(parents=True)
    written = []
    for number, share in enumerate(shares, 1):
        boxes = []
        for key, tensor in share.items():
            boxes.append(LocalBox(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor))
        written.append(files.write(staging, number, boxes))
    files.publish(folder, progress, written)
    files.delete_old(folder, limit, {kept_step})


def find_checkpoint(folder: Path, requested: str = "auto") -> Path | None:
    """Return the checkpoint from which a run in this folder resumes, or None without a whole one.

    Args:
        requested: --resume_from_checkpoint.
    """
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


def cut_and_lost_files(checkpoint: Path) -> Tried:
    """Cut each file at ten offsets; make it longer, missing, a folder, or a dangling link."""
    trials = 0
    missed = []
    for name in NAMES:
        path = checkpoint / name
        whole = path.read_bytes()
        for what, replace in replacements(whole).items():
            path.unlink()
            replace(path)
            trials += 1
            if not is_found(checkpoint, name):
                missed.append(f"{name}: {what}")
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)
            path.write_bytes(whole)
    return Tried(trials, missed)


def replacements(whole: bytes) -> dict[str, Callable[[Path], Any]]:
    """Return {name: function that puts something else in place of a file with these bytes}."""
    makers = {}
    for tenth in range(10):
        size = tenth * len(whole) // 10
        makers[f"cut at {size}"] = writer_of(whole[:size])
    makers["one byte more"] = writer_of(whole + b"x")
    makers["missing"] = lambda path: None
    makers["a folder"] = Path.mkdir
    makers["a link to nothing"] = lambda path: path.symlink_to("nowhere")
    return makers


def writer_of(content: bytes) -> Callable[[Path], Any]:
    """Return a function that writes these bytes to a path."""
    return lambda path: path.write_bytes(content)


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
    """Files and folders that look like a checkpoint are not taken for one, and stay."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    put_strays(folder)
    before = sorted(folder.rglob("*"))
    for step in (1, 2, 3):
        make_checkpoint(folder, step, limit=1)
    missed = []
    if find_checkpoint(folder) != folder / "checkpoint-3":
        missed.append("another one was taken")
    missed += [f"{path} is gone" for path in before if not is_there(path)]
    for path in (folder / "checkpoint-1", folder / "checkpoint-2"):
        if path.exists():
            missed.append(f"{path} is left")
    return Tried(len(before), missed)


def put_strays(folder: Path) -> None:
    """Make files, folders and a dangling link that look like checkpoints."""
    for name in ("checkpoint-99", "checkpoint-12345678901234567890"):
        (folder / name).write_text("a file")
    for name in STRAYS:
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    (folder / "checkpoint-77").symlink_to("nowhere")
    (folder / "notes.txt").write_text("mine")


def is_there(path: Path) -> bool:
    """Return whether a path exists, even if it is a dangling link."""
    return path.exists() or path.is_symlink()


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
