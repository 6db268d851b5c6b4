#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Copy a recipe, and only what it imports, into a new folder: a template that is yours.

    python scripts/copy_recipe.py llama my_project
    cd my_project && python test_copy.py

    python scripts/copy_recipe.py llama my_project --extras mesh --engines ddp fsdp2
    python scripts/copy_recipe.py --update my_project     # merges what has changed here since then

The folder gets the recipe under its own name, the modules of recipes/ that it imports, YAML files,
requirements.txt, LICENSE, a test of its own with a tiny model, and ORIGIN.md, which names the
commit. The copy runs there and needs nothing else from this repository. An update marks what was
changed in the copy and here as git does.

Exit codes: 0 done, 64 usage, 65 an update has conflicts, 73 cannot write.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from common import Exit, Parser, first_line, run_command, stop
from paths import ROOT
from template import copying
from tiny import makers

# What the model and the rows of a copy's test are made with
TINY = ["--num_train_rows", "700", "--num_test_rows", "70"]


def parse_args() -> argparse.Namespace:
    parser = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[copying.parser_of_wishes()],
    )
    add = parser.add_argument
    add("folder", nargs="?", type=Path, help="new or empty folder for the copy")
    add("--update", type=Path, metavar="FOLDER", help="update the copy in a folder")
    args = parser.parse_args()
    if args.update is None and args.folder is None:
        parser.error("name a recipe and a new folder, or --update FOLDER")
    return args


def copy(recipe: str, extras: Sequence[str], engines: Sequence[str], folder: Path) -> None:
    """Write a copy, and say how to start it.

    Raises ValueError for a recipe or an extra that is not there, or a folder that is not new.
    """
    recipes = {path.stem: path for path in sorted((ROOT / "recipes").glob("*.py"))}
    if recipe not in recipes:
        raise ValueError(f"there is no recipe {recipe}; choose from {', '.join(recipes)}")
    for name in extras:
        if name not in copying.extras_of(recipes[recipe]):
            raise ValueError(f"--extras {name}: {recipe} has no such extra")
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ValueError(f"{folder} is not an empty folder; name a new one")
    wish = (recipe, extras, engines)
    files = copying.files_of_copy(ROOT, *wish)
    copying.write(folder, files | {copying.ORIGIN: copying.origin_of(ROOT, *wish)})
    makers.make(recipe if recipe in makers.MAKERS else "llama", folder / "tiny", TINY)
    print(f"To start it: cd {shlex.quote(str(folder))}, then")
    print("  python test_copy.py")
    print(f"  accelerate launch --config_file accelerate_configs/fsdp.yaml {recipe}.py --help")


def main() -> int:
    args = parse_args()
    folder = args.update or args.folder
    conflicts = []
    try:
        if args.update is not None:
            conflicts = copying.update(ROOT, folder)
        else:
            copy(args.recipe, args.extras, args.engines, folder)
    except ValueError as error:
        stop(Exit.USAGE, str(error))
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write to {folder}: {first_line(error)}")
    for name in conflicts:
        print(f"{folder / name}: changed in the copy and here; resolve it")
    if args.update is not None and not conflicts:
        print(f"{folder} is updated; run its test_copy.py")
    return Exit.DATA if conflicts else Exit.DONE


if __name__ == "__main__":
    run_command(main)
