# SPDX-License-Identifier: Apache-2.0
"""Hold two commits against each other, bit for bit, on this machine.

    python tests/compare.py HEAD~1
    python tests/compare.py main my-branch -k "cells and llama"

Recipes, YAMLs and scripts of both are launched in worktrees by the tests of this checkout, every
cell, chain and ending of the net (tests/launch/test_cells.py, test_chains.py, test_stops.py). What
they leave is recorded and compared: exit code, each figure, checkpoint and tensor's name, and the
loss of each result. Ends with 0 if nothing differs, with 1 if something does or fails to run.

Without a second commit the first is held against this checkout as it is, changes included.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import golden

REPO = Path(__file__).resolve().parents[1]
TESTS = ("test_cells.py", "test_chains.py", "test_stops.py")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", help="a commit")
    parser.add_argument("after", nargs="?", help="another one, or this checkout")
    args, words = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        sides = {}
        for side, commit in (("before", args.before), ("after", args.after)):
            root = REPO
            if commit is not None:
                root = Path(folder, f"{side}-tree")
                git("worktree", "add", "--quiet", "--detach", root, commit)
            try:
                sides[side] = record(root, Path(folder, side), words)
            finally:
                if commit is not None:
                    git("worktree", "remove", "--force", root)
    lines = differences(sides["before"], sides["after"])
    if not sides["before"] and not sides["after"]:
        lines.append("nothing was compared: no launch has these words")
    print("\n".join(lines) or f"{len(sides['after'])} launches are equal to the last bit")
    sys.exit(bool(lines))


def git(*words):
    subprocess.run(["git", "-C", REPO, *words], check=True)


def record(root, folder, words):
    """What the launches of a checkout leave, {name: row}."""
    folder.mkdir()
    tests = [REPO / "tests" / "launch" / name for name in TESTS]
    environment = {"NET_ROOT": str(root), "GOLDEN": str(folder), "EXACT": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", *tests, *words]
    print(f"{root}:", flush=True)
    subprocess.run(command, env=os.environ | environment, cwd=REPO)
    golden.FOLDER = folder
    return golden.read("cells")


def differences(before, after):
    """What differs, a few lines of each row; a row on one side only is a difference."""
    lines = [f"{name}: ran on one side only" for name in sorted(before.keys() ^ after.keys())]
    for name in sorted(before.keys() & after.keys()):
        found = golden.differences(before[name], after[name], bound=0.0)
        lines += [f"{name}{line}" for line in found[:3]]
    return lines


if __name__ == "__main__":
    main()
