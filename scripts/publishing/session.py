# SPDX-License-Identifier: Apache-2.0
"""What is shown before a push, the question, and the push."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from exits import Exit, first_line, stop
from publishing import copies, selection
from publishing.card import CARD
from publishing.copies import Copy

HEAD_LINES = 12
TOO_MANY = 429
ADVICE = {
    401: "the token is not accepted: hf auth login",
    403: "the token may not write there: use one with write access, or another REPO_ID",
    404: "there is no such repository or revision: check REPO_ID and --revision",
    409: "the repository was changed meanwhile: run the same command again",
    TOO_MANY: "the hub asks for fewer requests: wait, and run the same command again",
}


def run(args: argparse.Namespace) -> None:
    """Show what would be pushed; push it with --yes or the user's consent."""
    check_names(args)
    problem = selection.find_unfinished(args.folder) or selection.find_no_result(args.folder)
    if problem is not None:
        stop(Exit.DATA, problem)
    files, left_out = selection.select(args.folder)
    unsafe = selection.find_unsafe(args.folder, list(files))
    if unsafe is not None:
        stop(Exit.DATA, unsafe)
    check_base(args)
    made = copies.make_copies(args.folder, args.base_model)
    for name, copy in made.items():
        files[name] = len(copy.content)
    show(args, files, made, left_out)
    if not args.yes and not is_agreed():
        print("Nothing was pushed. To push: the same command with --yes")
        return
    push(args, list(files), made)


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
    if args.base_model is None:
        local = selection.find_local_base(args.folder)
        if local is not None:
            stop(
                Exit.USAGE,
                f"the base of these adapters, {local or 'without a name'}, is only on this "
                "machine: pass --base_model ID, its id on the hub",
            )
    elif not (args.folder / selection.ADAPTERS).is_file():
        stop(Exit.USAGE, "--base_model is for adapters, and this folder has a whole model")


def show(
    args: argparse.Namespace,
    files: Mapping[str, int],
    made: Mapping[str, Copy],
    left_out: Sequence[str],
) -> None:
    """Print the files with their sizes, what stays here, who can see it, and the card's head.

    Args:
        files: {name: bytes}.
        made: what is pushed in place of files.
    """
    for name in sorted(files):
        why = f" ({made[name].why})" if name in made else ""
        print(f"{files[name]:>16,}  {name}{why}")
    print(f"{sum(files.values()):>16,}  bytes in {len(files)} files")
    print(f"stays here: {', '.join(left_out) or 'nothing'}")
    seen = "public" if args.public else "private"
    print(f"to: {args.repo_id}, revision {args.revision or 'main'}, {seen} if it is new")
    for found in copies.find_private(args.folder, files, made, args.repo_id):
        print(f"note: {found}")
    if CARD not in files:
        print("card: none")
        return
    print("card:")
    for line in copies.read_text(args.folder, CARD, made).splitlines()[:HEAD_LINES]:
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


def push(args: argparse.Namespace, names: list[str], made: Mapping[str, Copy]) -> None:
    """Create the repository if there is none, and upload the files in one commit."""
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, get_token

    if get_token() is None:
        stop(Exit.NO_HUB, "there is no token of the hub: hf auth login")
    operations = []
    for name in names:
        content: Any = str(Path(args.folder, name))
        if name in made:
            content = made[name].content
        with selection.reading(args.folder / name):
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
        stop(Exit.NO_HUB, describe(error))
    print(f"Pushed {len(names)} files to {repo}")


def describe(error: BaseException) -> str:
    """Return in one line why a push failed: the hub's answer, or that there was none."""
    from huggingface_hub.errors import HfHubHTTPError

    cause: BaseException | None = error
    while cause is not None:  # That of an upload is the cause of a RuntimeError.
        if isinstance(cause, HfHubHTTPError):
            code = cause.response.status_code
            advice = ADVICE.get(code, "run the same command again later")
            wait = cause.response.headers.get("Retry-After", "")
            if code == TOO_MANY and wait.isdigit():
                advice = f"wait {wait} s, and run the same command again"
            return f"the hub answered {code}: {advice}"
        cause = cause.__cause__
    return f"the push was cut ({first_line(error)}): run the same command again"
