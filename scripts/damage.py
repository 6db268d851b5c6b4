"""Damage to checkpoints, in this process: what scripts/fault_injection.py and the static tests try on them.

Each function returns (number of trials, list of what was not found).
"""

import copy
import json
import os
import pickle
import random
import shutil
import sys
import time
from argparse import Namespace
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "recipes"))
import fault_tolerance  # noqa: E402  from recipes/
from fault_tolerance import FILES, hash_of  # noqa: E402

NAMES = (*fault_tolerance.FILES, "manifest.json")


def make_checkpoint(folder, step, numbers=3000, limit=9):
    """Publish a small checkpoint, as a run would."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "weight": torch.full((numbers,), float(step)),
        "state.weight.exp_avg": torch.arange(1.0 * numbers),
    }
    fault_tolerance.publish(folder, state, {"step": step, "arguments": {"seed": 42}}, limit)
    return folder / f"checkpoint-{step}"


def share_of_hashing(folder, numbers):
    """Save so many fp32 numbers; return the part of the seconds that hashing takes."""
    state, start = {"weight": torch.rand(numbers)}, time.perf_counter()
    fault_tolerance.publish(folder, state, {"step": 1}, 2)
    whole, start = time.perf_counter() - start, time.perf_counter()
    hash_of(folder / "checkpoint-1" / FILES[0])
    share = (time.perf_counter() - start) / whole
    shutil.rmtree(folder / "checkpoint-1")
    return share


def found(checkpoint, name):
    """Whether damage to a file is found and the file named; a wrong hash in the manifest blames the other file."""
    problem = fault_tolerance.problem_of(checkpoint)
    return problem is not None and (problem.startswith(name) or name == "manifest.json")


def flipped_bits(checkpoint, flips, seed=0):
    """One flipped bit at a time, spread over each file."""
    dice, missed = random.Random(seed), []
    for i in range(flips):
        path = checkpoint / NAMES[i % len(NAMES)]
        position = dice.randrange(path.stat().st_size)
        with open(path, "r+b") as file:
            byte = os.pread(file.fileno(), 1, position)
            os.pwrite(file.fileno(), bytes([byte[0] ^ 1 << dice.randrange(8)]), position)
            if not found(checkpoint, path.name):
                missed.append(f"{path.name}, byte {position}")
            os.pwrite(file.fileno(), byte, position)
    return flips, missed


def cut_and_lost_files(checkpoint):
    """Each file cut at ten offsets, empty, longer by a byte, missing, a folder, and a dangling link."""
    trials, missed = 0, []
    for name in NAMES:
        path, whole = checkpoint / name, (checkpoint / name).read_bytes()
        contents = {
            f"cut at {i * len(whole) // 10}": whole[: i * len(whole) // 10] for i in range(10)
        }
        contents["one byte more"] = whole + b"x"
        makers = {
            what: lambda path, content=content: path.write_bytes(content)
            for what, content in contents.items()
        }
        makers |= {
            "missing": lambda path: None,
            "a folder": Path.mkdir,
            "a link to nothing": lambda path: path.symlink_to("nowhere"),
        }
        for what, make in makers.items():
            path.unlink()
            make(path)
            trials += 1
            if not found(checkpoint, name):
                missed.append(f"{name}: {what}")
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
            path.write_bytes(whole)
    return trials, missed


def mutate(dice, manifest):
    """A manifest with one to three random changes, of its bytes or of its values, as bytes."""
    if dice.random() < 0.5:
        text = bytearray(json.dumps(manifest, indent=2).encode())
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(text))
            text[start : start + dice.choice((0, 1, 1, 8))] = dice.randbytes(
                dice.choice((0, 1, 1, 4))
            )
        return bytes(text)
    changed = json.loads(json.dumps(manifest))
    odd = [
        None,
        True,
        [],
        {},
        -1,
        0,
        1.5,
        10**40,
        float("nan"),
        "",
        "x",
        "../../etc",
        [[[]]],
        {"size": 1},
    ]
    for _ in range(dice.randint(1, 3)):
        owner = dice.choice(
            [changed, *(part for part in changed.values() if isinstance(part, dict))]
        )
        key = dice.choice([*owner, "other"])
        if dice.random() < 0.3:
            owner.pop(key, None)
        else:
            owner[key] = copy.deepcopy(dice.choice(odd))
    return json.dumps(dice.choice(odd) if dice.random() < 0.1 else changed).encode()


def same(manifest, content):
    """Whether a manifest's bytes say what the true one says about both files."""
    try:
        read = json.loads(content)
        return all(
            read[name][key] == manifest[name][key] for name in manifest for key in manifest[name]
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def mutated_manifests(checkpoint, number, seed=0):
    """Manifests with random changes: none raises, none is trusted that says something else."""
    path, dice, missed = checkpoint / "manifest.json", random.Random(seed), []
    whole = path.read_bytes()
    manifest = json.loads(whole)
    deep = [b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"\xff\xfe", b"\x00" * 64]
    for i in range(number):
        content = deep[i] if i < len(deep) else mutate(dice, manifest)
        with open(
            path, "r+b"
        ) as file:  # cut last: a file cut to nothing first is flushed each time
            file.write(content)
            file.truncate()
        try:
            trusted = fault_tolerance.problem_of(checkpoint) is None
        except Exception as error:  # whatever it is, it must not
            missed.append(f"{type(error).__name__}: {content[:300]}")
        else:
            if trusted and not same(manifest, content):
                missed.append(f"trusted: {content[:300]}")
    path.write_bytes(whole)
    return number, missed


def older_one_is_taken(folder):
    """With any file of the newest checkpoint damaged the one before is found, and the damaged one is kept aside."""
    missed = []
    for name in NAMES:
        shutil.rmtree(folder, ignore_errors=True)
        older, newest = make_checkpoint(folder, 3), make_checkpoint(folder, 7)
        (newest / name).write_bytes(b"")
        args = Namespace(output_dir=str(folder), resume_from_checkpoint="auto", dry_run=False)
        if fault_tolerance.search_checkpoint(args) != older:
            missed.append(f"{name}: another one")
        kept = list(folder.glob("checkpoint-7.damaged-*"))
        if len(kept) != 1 or newest.exists():
            missed.append(f"{name}: the damaged one is lost")
    return len(NAMES), missed


def stray_files(folder):
    """What is named like a checkpoint, or lies beside it, is not taken for one and stays."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("checkpoint-99", "checkpoint-12345678901234567890"):
        (folder / name).write_text("a file")
    for name in (
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
    ):
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    (folder / "checkpoint-77").symlink_to("nowhere")
    (folder / "notes.txt").write_text("mine")
    before = sorted(folder.rglob("*"))
    for step in (1, 2, 3):
        make_checkpoint(folder, step, limit=1)
    args = Namespace(output_dir=str(folder), resume_from_checkpoint="auto", dry_run=False)
    missed = (
        []
        if fault_tolerance.search_checkpoint(args) == folder / "checkpoint-3"
        else ["another one was taken"]
    )
    missed += [f"{path} is gone" for path in before if not (path.exists() or path.is_symlink())]
    missed += [
        f"{path} is left"
        for path in (folder / "checkpoint-1", folder / "checkpoint-2")
        if path.exists()
    ]
    return len(before), missed


class Planted:
    """Unpickled, it runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def plain_pickle(path, mark):
    """A pickle that makes the file `mark` when it is loaded."""
    path.write_bytes(pickle.dumps({"weight": Planted(f"touch {mark}")}))


def torch_pickle(path, mark):
    """The same, as torch.save writes it."""
    torch.save({"weight": Planted(f"touch {mark}")}, path)


def forge(checkpoint, name, mark):
    """A pickle in place of a file of a checkpoint, with a manifest that fits."""
    torch_pickle(checkpoint / name, mark)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest[name] = {
        "size": (checkpoint / name).stat().st_size,
        "xxh3_128": hash_of(checkpoint / name),
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
