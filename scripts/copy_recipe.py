#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Copy a recipe, and only what it imports, into a new folder: a template that is yours.

    python scripts/copy_recipe.py llama my_project
    cd my_project && accelerate launch --config_file accelerate_configs/fsdp.yaml llama.py --help

The folder gets the recipe under its own name, the modules of recipes/ that it imports, the extras
that it lists (or fewer: --extras), accelerate_configs/, requirements.txt, LICENSE, and ORIGIN.md,
which names the commit. The copy runs there and needs nothing else from this repository. At its end
the command says how large it is.

Exit codes: 0 done, 64 usage, 73 cannot write.
"""

import argparse
import difflib
import shlex
from pathlib import Path

from exits import Exit, first_line, run_command, stop
from paths import ROOT
from template.copying import COMPONENTS, copy_recipe, find_recipes
from template.imports import extras_of
from usage import Parser


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", help="name of a recipe in recipes/, such as llama")
    parser.add_argument("folder", type=Path, help="new or empty folder for the copy")
    parser.add_argument(
        "--extras",
        nargs="*",
        metavar="NAME",
        help="folders of recipes/extras/ to take along, of those that the recipe lists [all]",
    )
    return parser.parse_args()


def choose_recipe(name: str) -> Path:
    """Return the file of a recipe; exit with 64 and a suggestion for an unknown name."""
    recipes = find_recipes(ROOT)
    if name in recipes:
        return recipes[name]
    close = difflib.get_close_matches(name, recipes, n=1)
    suggestion = f"did you mean {close[0]}?" if close else f"choose from {', '.join(recipes)}"
    stop(Exit.USAGE, f"there is no recipe {name}; {suggestion}")


def check_folder(folder: Path) -> None:
    """Exit with 64 unless the folder is new or empty."""
    if folder.is_dir():
        if any(folder.iterdir()):
            stop(Exit.USAGE, f"{folder} is not empty; name a new folder")
    elif folder.exists():
        stop(Exit.USAGE, f"{folder} is not a folder")


def describe_size(folder: Path, files: list[Path]) -> str:
    """Return how many lines a copy has: the recipe is the first of its files."""
    lines = [len((folder / file).read_text(encoding="utf-8").splitlines()) for file in files]
    return (
        f"{lines[0]:,} lines of {files[0]} to read and change, on {len(files) - 1} modules with "
        f"{sum(lines[1:]):,} lines in {COMPONENTS}"
    )


def main() -> None:
    args = parse_args()
    recipe = choose_recipe(args.recipe)
    command = shlex.join(["python", "scripts/copy_recipe.py", args.recipe, str(args.folder)])
    listed = extras_of(recipe)
    if args.extras is not None:
        command += f" --extras {shlex.join(args.extras)}"
        if not set(args.extras) <= set(listed):
            stop(Exit.USAGE, f"--extras: {args.recipe} lists {', '.join(listed)}")
        listed = [name for name in listed if name in args.extras]
    try:
        check_folder(args.folder)
        files = copy_recipe(ROOT, recipe, args.folder, command, listed)
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write to {args.folder}: {first_line(error)}")
    for path in files:
        print(args.folder / path)
    print(describe_size(args.folder, files))
    print(f"To start it: cd {shlex.quote(str(args.folder))}, then")
    config = "accelerate_configs/fsdp.yaml"
    print(f"  accelerate launch --config_file {config} {recipe.name} --help")


if __name__ == "__main__":
    run_command(main)
