# SPDX-License-Identifier: Apache-2.0
"""Where a copy comes from, so that its owner can look up what has changed since then."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = "Accelerate Recipes"
TEXT = """# Origin

`{program}` and the modules that it imports were copied from *{repository}*, {version}, with

    {command}

The copy is yours: it runs from this folder and needs nothing else from that repository.
`grep -rn EDIT --include='*.py' .` shows what to adapt first. To start it:

    pip install -r requirements.txt
    accelerate launch --config_file accelerate_configs/fsdp.yaml {program} --help

A name that begins with `ORIGIN/` in a message or a comment is a file of that repository which was
not copied. Put the path of your clone of it in place of `ORIGIN`, as in

    python ORIGIN/scripts/chat.py OUTPUT_DIR          # chat with the trained model
    python ORIGIN/scripts/plot_loss.py OUTPUT_DIR     # draw its loss
    python ORIGIN/scripts/plan_memory.py --help       # plan the memory of a launch
    python ORIGIN/scripts/rehearse.py --help          # rehearse a launch on CPU processes
"""
CHANGES = """
To see what has changed since then, run in that repository

    {words}
"""


@dataclass(frozen=True)
class Commit:
    """The commit that is checked out."""

    name: str  # its hash
    date: str  # such as 2026-11-23
    is_changed: bool  # the copied files have changes that are not committed


def find_commit(root: Path, files: Sequence[Path]) -> Commit | None:
    """Return the commit of a repository, or None if the folder is not one.

    files: what is copied.
    """
    try:
        # A folder without .git may be inside another repository, whose commit means nothing here.
        if git(root, "rev-parse", "--show-prefix"):
            return None
        name, date = git(root, "log", "-1", "--format=%H %cs").split()
        changes = git(root, "status", "--porcelain", "--", *map(str, files))
    except (OSError, subprocess.CalledProcessError):
        return None
    return Commit(name, date, bool(changes))


def git(root: Path, *words: str) -> str:
    """Return what a git command prints about a folder."""
    done = subprocess.run(
        ["git", "-C", str(root), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def describe(program: str, command: str, commit: Commit | None, modules: Sequence[str]) -> str:
    """Return the text of ORIGIN.md.

    program: the file name of the recipe.
    command: the one that made the copy.
    modules: what the recipe imports, as paths in the copy.
    """
    text = TEXT.format(
        program=program, repository=REPOSITORY, version=version(commit), command=command
    )
    if commit is None:
        return text
    paths = [f"recipes/{name}" for name in (program, *modules)]
    words = " \\\n        ".join([f"git diff {commit.name} --", *paths])
    return text + CHANGES.format(words=words)


def version(commit: Commit | None) -> str:
    """Return in words which version was copied."""
    if commit is None:
        return "an unknown version, since git has no commit of it"
    text = f"commit {commit.name} of {commit.date}"
    if commit.is_changed:
        text += ", with changes that were not committed"
    return text
