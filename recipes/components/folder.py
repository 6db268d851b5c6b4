# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: whether it can be written to, and what an earlier run left in it."""

import glob
import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.data import FILE_TYPES, find_files
from core.exits import Exit, fail

# Files that a run writes into its folder, besides checkpoints and the result
STATUS = "status.json"
RUN = "run.json"
METRICS = "metrics.jsonl"
LATEST = "latest"
MANIFEST = "manifest.json"  # In the folder of a checkpoint
NONFINITE_ROWS = "nonfinite_rows.jsonl"
# The weights of the result in one file, or the file that names those of several
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# The answers of the evaluation after a step (--predict_with_generate of language models)
PREDICTIONS = re.compile(r"predictions-([0-9]+)\.jsonl")
WRITTEN = (STATUS, RUN, METRICS, LATEST, NONFINITE_ROWS)
# Files of a model or of adapters, in any form in which libraries have written them
MODEL_FILES = (
    "config.json",
    "adapter_config.json",
    "*.safetensors",
    "pytorch_model*.bin",
    "adapter_model.bin",
)
OWN_FILES = (*WRITTEN, *MODEL_FILES, "predictions*.jsonl")


def check_output_dir(output_dir: str) -> None:
    """End with 73 if the path of the output folder cannot be followed. Nothing is created yet.

    The path may lead through a file, be too long, circular or forbidden.
    """
    try:
        os.stat(output_dir)
    except FileNotFoundError:
        if os.path.islink(output_dir):
            target = os.readlink(output_dir)
            fail(
                Exit.CANNOT_WRITE,
                f"--output_dir {output_dir}: is a link to {target}, which is not there",
            )
    except OSError as error:
        fail(Exit.CANNOT_WRITE, f"--output_dir {output_dir}: {error.strerror}")


def check_overwrites_nothing(args: Any) -> None:
    """End with 64 if the run would overwrite rows, the base model, or one that is not a run's.

    Nothing is written into the folder of such a model, or of such rows, not even a status.
    """
    folder = Path(args.output_dir)
    problem = find_model_at_risk(folder, Path(args.model_name_or_path))
    problem = problem or find_rows_at_risk(folder, args)
    if problem is not None:
        fail(Exit.USAGE, f"--output_dir {args.output_dir}: {problem}")


def find_model_at_risk(folder: Path, model: Path) -> str | None:
    """Return why the result of a run in this folder would overwrite a model, or None.

    A model that an earlier run has left in its folder may be replaced. Links are followed.
    """
    if is_same_folder(folder, model):
        return (
            "is the folder of --model_name_or_path, and the result would overwrite that model: "
            "choose another --output_dir"
        )
    files: list[str] = []
    for pattern in MODEL_FILES:
        files += sorted(path.name for path in folder.glob(pattern))
    if not files or is_of_a_run(folder):
        return None
    return (
        f"has a model ({', '.join(files[:3])}) but no {RUN}, so it is not from a run of these "
        "recipes, and the result would overwrite it: choose another --output_dir"
    )


def find_rows_at_risk(folder: Path, args: Any) -> str | None:
    """Return why a run in this folder would overwrite its rows or read its own files, or None."""
    fix = "choose another --output_dir"
    names = args.dataset_name if isinstance(args.dataset_name, list) else [args.dataset_name]
    sources = [(name, args.dataset_train_split) for name in names]
    if args.eval_dataset_name:
        sources.append((args.eval_dataset_name, args.dataset_test_split))
    written = [path for pattern in OWN_FILES for path in folder.glob(pattern)]
    places = [folder.resolve(), *folder.resolve().parents]
    for name, split in sources:
        files = [file for file in find_files(name, split, (*FILE_TYPES, ".txt")) if file.exists()]
        for path in written:
            if any(path.samefile(file) for file in files):
                return f"the run would overwrite the rows in {path}: {fix}"
        if not files and Path(name).is_dir() and Path(name).resolve() in places:
            # Those that the split names, or else all that is in the folder
            read = list(Path(name).rglob(f"{glob.escape(split)}*")) or [Path(name)]
            if any(path.resolve() in places for path in read):
                return f"the run would read its own files among the rows of {name}: {fix}"
    return None


def is_same_folder(one: Path, other: Path) -> bool:
    """Return whether two paths, of which neither has to exist, lead to the same folder."""
    if one.exists() and other.exists():
        return one.samefile(other)
    return one.resolve() == other.resolve()


def is_of_a_run(folder: Path) -> bool:
    """Return whether a run of these recipes has written into a folder."""
    return (folder / RUN).is_file() or any(folder.glob(f"checkpoint-*/{MANIFEST}"))


def find_problem(folder: Path, dry_run: bool) -> str | None:
    """Create a folder, unless this is a dry run, and return why a run cannot write there, or None.

    Existing files are not changed.
    """
    tried = folder
    try:
        if dry_run:
            tried = nearest_folder(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=tried):
            pass
        for name in WRITTEN:
            tried = folder / name
            if tried.exists():
                with open(tried, "ab"):
                    pass
    except OSError as error:
        return f"--output_dir {folder}: cannot write to {tried}: {error.strerror}"
    return None


def nearest_folder(path: Path | str) -> Path:
    """Return the folder at this path, or its nearest parent that exists."""
    path = Path(path)
    while not path.exists():
        path = path.parent
    return path


def predictions_file(folder: Path, step: int) -> Path:
    """Return the file for the answers of the evaluation after a step."""
    return folder / f"predictions-{step}.jsonl"


def remove_predictions_after(folder: Path, step: int) -> None:
    """Remove the answers of evaluations after a step: the run that continues there makes its own.

    Without this, those of an earlier run would be left between them.
    """
    for path in folder.iterdir():
        found = PREDICTIONS.fullmatch(path.name)
        if found is not None and int(found[1]) > step:
            path.unlink()


def has_result(folder: Path) -> bool:
    """Return whether a folder has all weights of a finished run: adapters, one file or shards."""
    single_files = ("adapter_model.safetensors", SINGLE)
    if any((folder / name).is_file() for name in single_files):
        return True
    try:
        index = json.loads((folder / INDEX).read_text())
        shards = set(index["weight_map"].values())
    except (OSError, ValueError, LookupError):  # There is no index, or it is damaged.
        return False
    return all((folder / name).is_file() for name in shards)


def difference_from_finished_run(folder: Path, arguments: Mapping[str, Any]) -> str:
    """Return how the run that wrote run.json differs from a call with these arguments, in words.

    Returns "" if the call is the same.
    """
    try:
        before = json.loads((folder / RUN).read_text())["arguments"]
    except (OSError, ValueError, LookupError):
        return "has no run.json that can be read"
    now = json.loads(json.dumps(dict(arguments)))  # run.json has lists in place of tuples.
    changed = []
    for name, value in now.items():
        if value != before.get(name, value) and name != "allow_change":
            changed.append(name)
    return f"had other values of {', '.join(changed)}" if changed else ""


def takes_newest(folder: Path, requested: str) -> bool:
    """Return whether the newest checkpoint of the run's own folder is used if there is one."""
    if requested in ("auto", "none"):
        return requested == "auto"
    return Path(requested).resolve().parent != folder.resolve()
