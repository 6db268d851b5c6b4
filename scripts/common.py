# SPDX-License-Identifier: Apache-2.0
"""What the commands have in common: how they end, their command lines, and names of models."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import paths  # noqa: F401  makes recipes/ importable
from core import __version__
from core.exits import Exit, print_without_failing

RUNS = "runs/"  # where the recipes write unless --output_dir says otherwise


# ---- Endings ----
def stop(code: Exit, message: str) -> NoReturn:
    """End the process with a code after one line on stderr."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(int(code))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type where it has no message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a command, and end the process with the exit code that it returns.

    That imports what takes seconds: a wrong flag and --help are answered at once.
    """
    print_without_failing()
    sys.exit(main())


# ---- Command lines ----
class Parser(argparse.ArgumentParser):
    """An ArgumentParser with --version, whose usage errors are one line and end with 64."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def error(self, message: str) -> NoReturn:
        self.exit(Exit.USAGE, f"{self.prog}: {message}\n")


def at_least_1(text: str) -> int:
    """Return a number of at least 1, as a type of an argument."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def add_loading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on how a trained folder is loaded."""
    add = parser.add_argument
    add(
        "--dtype",
        default="auto",
        choices=["auto", "float32", "bfloat16", "float16"],
        help="type of the weights; auto: as they were saved [%(default)s]",
    )
    add("--device", help="cpu, cuda, cuda:1 [cuda if there is a GPU, or else cpu]")
    add("--load_in_4bit", action="store_true", help="nf4 weights (bitsandbytes)")


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options on the prompts that a trained model and another form of it are asked."""
    add = parser.add_argument
    add("--prompts", type=Path, help="take the prompts from this file [the rows of the run]")
    add("--num_prompts", type=at_least_1, default=50, help="number of prompts [%(default)s]")
    add("--device", help="cpu, cuda, cuda:1: of the trained model [cuda if there is a GPU, or cpu]")
    add(
        "--bound",
        type=float,
        help="largest logit gap that is not an error, as a part of the largest logit [1e-4 for "
        "float32, more for types of fewer bits]",
    )


# ---- Names of models ----
def is_path(name: str) -> bool:
    """Return whether a name can only be a path, since a hub id does not look like that."""
    return name.startswith((".", "/", "~", RUNS)) or name.count("/") > 1


def find_missing(name: str) -> str | None:
    """Return why a model is not asked of the hub although it is no path here; None if it may be."""
    if Path(name).exists() or not is_path(name):
        return None
    return f"{name}: no such folder"
