# SPDX-License-Identifier: Apache-2.0
"""Small checkpoints, made in this process, and pickles to be planted in them."""

import json
import os
import pickle
import shutil
from pathlib import Path

import torch

from core import checkpoint as files
from core.boxes import LocalBox
from core.checkpoint import find_damage, hash_of

MANIFEST = "manifest.json"
STATE_FILES = ("state-00001.safetensors", "state-00002.safetensors")
FILES = (*STATE_FILES, files.BOXES, files.PROGRESS)
NAMES = (*FILES, MANIFEST)


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
