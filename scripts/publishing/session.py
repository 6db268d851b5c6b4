# SPDX-License-Identifier: Apache-2.0
"""What is shown before a push, the question, and the push."""

import argparse
import sys
from pathlib import Path
from typing import Any

from exits import Exit, first_line, stop
from publishing import selection

HEAD_LINES = 12
ADVICE = {
    401: "the token is not accepted: hf auth login",
    403: "the token may not write there: use one with write access, or another REPO_ID",
    404: "there is no such repository or revision: check REPO_ID and --revision",
    409: "the repository was changed meanwhile: run the same command again",
    429: "the hub asks for fewer requests: wait, and run the same command again",
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
    replaced = replace_base(args)
    for name, content in replaced.items():
        files[name] = len(content)
    show(args, files, left_out)
    if not args.yes and not is_agreed():
        print("Nothing was pushed. To push: the same command with --yes")
        return
    push(args, list(files), replaced)


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


def replace_base(args: argparse.Namespace) -> dict[str, bytes]:
    """Return the files that get the hub id of the base; end with 64 if it has to be given."""
    local = selection.find_local_base(args.folder)
    if args.base_model is None:
        if local is not None:
            stop(
                Exit.USAGE,
                f"the base of these adapters, {local or 'without a name'}, is only on this "
                "machine: pass --base_model ID, its id on the hub",
            )
        return {}
    if not (args.folder / selection.ADAPTERS).is_file():
        stop(Exit.USAGE, "--base_model is for adapters, and this folder has a whole model")
    return selection.with_base(args.folder, args.base_model)


def show(args: argparse.Namespace, files: dict[str, int], left_out: list[str]) -> None:
    """Print the files with their sizes, what stays here, who can see it, and the card's head."""
    for name, size in files.items():
        print(f"{size:>16,}  {name}")
    print(f"{sum(files.values()):>16,}  bytes in {len(files)} files")
    print(f"left out: {', '.join(left_out) or 'nothing'}")
    seen = "public" if args.public else "private"
    print(f"to: {args.repo_id}, revision {args.revision or 'main'}, {seen} if it is new")
    card = args.folder / "README.md"
    if not card.is_file():
        print("card: none")
        return
    print("card:")
    for line in card.read_text(errors="replace").splitlines()[:HEAD_LINES]:
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


def push(args: argparse.Namespace, names: list[str], replaced: dict[str, bytes]) -> None:
    """Create the repository if there is none, and upload the files in one commit."""
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError

    if get_token() is None:
        stop(Exit.NO_HUB, "there is no token of the hub: hf auth login")
    operations = []
    for name in names:
        content: Any = replaced.get(name, str(Path(args.folder, name)))
        with selection.reading(args.folder / name):
            operations.append(CommitOperationAdd(path_in_repo=name, path_or_fileobj=content))
    api = HfApi()
    try:
        made = api.create_repo(args.repo_id, private=not args.public, exist_ok=True)
        api.create_commit(
            made.repo_id,
            operations,
            commit_message=args.commit_message,
            revision=args.revision,
        )
    except HfHubHTTPError as error:
        code = error.response.status_code
        advice = ADVICE.get(code, "run the same command again later")
        stop(Exit.NO_HUB, f"the hub answered {code}: {advice}")
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError) as error:
        stop(
            Exit.NO_HUB,
            f"the push was cut ({first_line(error)}): run the same command again",
        )
    print(f"Pushed {len(names)} files to {made}")
