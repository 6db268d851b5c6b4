#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
r"""Show what of a run's folder would be pushed to the hub, and push it: private by default.

    python scripts/push.py runs/lora owner/name           # shows, and asks on a terminal
    python scripts/push.py runs/lora owner/name --yes     # pushes to a private repository
    python scripts/push.py runs/lora owner/name --base_model owner/base --yes

Checkpoints, logs, answers, caches and unfinished files stay here. --base_model is the hub id of the
base; it replaces the path of a base on this machine in the pushed copy only. A push that was cut is
run again with the same command.

Exit codes: 0 done, 64 usage, 65 data, 69 hub.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Exit, Parser, first_line, run_command, stop
from publishing import folder

HEAD_LINES = 12  # of the card that are shown


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("folder", type=Path, help="output folder of a finished run, or of a merge")
    add("repo_id", help="owner/name, or a name of your own")
    add("--public", action="store_true", help="let everyone see a new repository")
    add("--revision", help="branch to push to, which must exist [main]")
    add("--commit_message", default="Upload model", help="message of the commit [%(default)s]")
    add("--base_model", help="hub id of the base, in place of a path on this machine")
    add("--yes", action="store_true", help="push without asking")
    return parser.parse_args()


def check(args: argparse.Namespace) -> None:
    """End with 64 or 65 for a folder that is not pushed, or whose base the hub would not find."""
    problem = folder.find_problem(args.folder)
    if problem is not None:
        stop(Exit.DATA, problem)
    if args.base_model is not None and not (args.folder / folder.ADAPTERS).is_file():
        stop(Exit.USAGE, "--base_model is for adapters, and this folder has a whole model")
    local = folder.local_base(args.folder)
    if args.base_model is None and local is not None:
        fix = "pass --base_model ID, its id on the hub"
        stop(Exit.USAGE, f"the base of these adapters, {local}, is only on this machine: {fix}")


def show(
    args: argparse.Namespace,
    sizes: Mapping[str, int],
    stays: Sequence[str],
    texts: Mapping[str, bytes],
) -> None:
    """Print the files with their sizes, what stays here, who can see it, and the card's head.

    Args:
        texts: {name: content} of the files that are no weights, as they are pushed.
    """
    for name, size in sizes.items():
        print(f"{size:>16,}  {name}")
    print(f"{sum(sizes.values()):>16,}  bytes in {len(sizes)} files")
    print(f"stays here: {', '.join(stays) or 'nothing'}")
    seen = "public" if args.public else "private"
    print(f"to: {args.repo_id}, revision {args.revision or 'main'}, {seen} if it is new")
    print("card:")
    for line in texts.get(folder.CARD, b"none").decode(errors="replace").splitlines()[:HEAD_LINES]:
        print(f"    {line}")


def is_agreed() -> bool:
    """Return whether the user, on a terminal, agrees to the push."""
    return sys.stdin.isatty() and input("Push this? [y/N] ").strip().lower() in ("y", "yes")


def push(args: argparse.Namespace, contents: Mapping[str, Any]) -> None:
    """Create the repository if there is none, and upload the files in one commit.

    Args:
        contents: {name: the path of a file here, or its content}.
    """
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        stop(Exit.NO_HUB, "there is no token of the hub: hf auth login")
    operations = [CommitOperationAdd(name, content) for name, content in contents.items()]
    api = HfApi()
    try:
        repo = api.create_repo(args.repo_id, private=not args.public, exist_ok=True)
        api.create_commit(
            repo.repo_id,
            operations,
            commit_message=args.commit_message,
            revision=args.revision,
        )
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        cause = error.__cause__ or error  # That of an upload is the cause of a RuntimeError
        stop(Exit.NO_HUB, f"the push ended ({first_line(cause)}): run the same command again")
    print(f"Pushed {len(contents)} files to {repo}")


def main() -> None:
    args = parse_args()
    check(args)
    names, stays = folder.select(args.folder)
    made = folder.make_copies(args.folder, args.base_model)
    texts = {**folder.read_texts(args.folder, names), **made}
    secret = folder.find_secret(texts)
    if secret is not None:
        stop(Exit.DATA, secret)
    contents: dict[str, Any] = {name: str(args.folder / name) for name in names} | made
    sizes = {name: (args.folder / name).stat().st_size for name in names}
    sizes |= {name: len(content) for name, content in made.items()}
    show(args, dict(sorted(sizes.items())), stays, texts)
    if args.yes or is_agreed():
        push(args, contents)
    else:
        print("Nothing was pushed. To push: the same command with --yes")


if __name__ == "__main__":
    run_command(main)
