# SPDX-License-Identifier: Apache-2.0
"""What is shown before a push, the question, and the push."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common import Exit, first_line, stop
from publishing import folder
from publishing.folder import ADAPTERS, CARD

HEAD_LINES = 12


def run(args: argparse.Namespace) -> None:
    """Show what would be pushed; push it with --yes or the user's consent."""
    check_names(args)
    problem = folder.find_problem(args.folder)
    if problem is not None:
        stop(Exit.DATA, problem)
    check_base(args)
    names, stays = folder.select(args.folder)
    problem = folder.find_secret(args.folder, names)
    if problem is not None:
        stop(Exit.DATA, problem)
    made = folder.make_copies(args.folder, args.base_model)
    names = sorted({*names, *made})
    show(args, names, stays, made)
    if not args.yes and not is_agreed():
        print("Nothing was pushed. To push: the same command with --yes")
        return
    push(args, names, made)


def check_names(args: argparse.Namespace) -> None:
    """End with 64 for a name that the hub would not take."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    for name in (args.repo_id, args.base_model):
        if name is None:
            continue
        try:
            validate_repo_id(name)
        except HFValidationError as error:
            stop(Exit.USAGE, f"{name}: is not an id of the hub (owner/name): {first_line(error)}")


def check_base(args: argparse.Namespace) -> None:
    """End with 64 if the hub id of the base is missing, or is given for a whole model."""
    if args.base_model is not None and not (args.folder / ADAPTERS).is_file():
        stop(Exit.USAGE, "--base_model is for adapters, and this folder has a whole model")
    local = folder.local_base(args.folder)
    if args.base_model is None and local is not None:
        fix = "pass --base_model ID, its id on the hub"
        stop(Exit.USAGE, f"the base of these adapters, {local}, is only on this machine: {fix}")


def show(
    args: argparse.Namespace,
    names: Sequence[str],
    stays: Sequence[str],
    made: Mapping[str, bytes],
) -> None:
    """Print the files with their sizes, what stays here, who can see it, and the card's head.

    Args:
        made: {name: what is pushed in place of the file here}.
    """
    texts = dict(made)
    total = 0
    for name in names:
        path = args.folder / name
        size = len(made[name]) if name in made else path.stat().st_size
        total += size
        if name not in made and size < folder.LARGEST_READ and path.suffix != ".safetensors":
            texts[name] = path.read_bytes()
        why = " (made for the push)" if name in made else ""
        print(f"{size:>16,}  {name}{why}")
    print(f"{total:>16,}  bytes in {len(names)} files")
    print(f"stays here: {', '.join(stays) or 'nothing'}")
    seen = "public" if args.public else "private"
    print(f"to: {args.repo_id}, revision {args.revision or 'main'}, {seen} if it is new")
    for found in folder.find_paths(texts):
        print(f"note: {found}")
    print("card:" if CARD in texts else "card: none")
    for line in texts.get(CARD, b"").decode(errors="replace").splitlines()[:HEAD_LINES]:
        print(f"    {line}")


def is_agreed() -> bool:
    """Return whether the user, on a terminal, agrees to the push."""
    if not sys.stdin.isatty():
        return False
    try:
        answer = input("Push this? [y/N] ")
    except (EOFError, KeyboardInterrupt):  # Ctrl-D or Ctrl-C
        print()
        return False
    return answer.strip().lower() in ("y", "yes")


def push(args: argparse.Namespace, names: Sequence[str], made: Mapping[str, bytes]) -> None:
    """Create the repository if there is none, and upload the files in one commit."""
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        stop(Exit.NO_HUB, "there is no token of the hub: hf auth login")
    operations = []
    for name in names:
        content: Any = made.get(name) or str(Path(args.folder, name))
        operations.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content))
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
    print(f"Pushed {len(names)} files to {repo}")
