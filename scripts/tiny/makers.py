# SPDX-License-Identifier: Apache-2.0
"""The makers, found by looking: X.py here makes the model and the rows that recipes/X.py trains on.

Such a module has `make(folder, options)`. Its options are those in options.py that are named after
the recipe, or else its own class `Options`; to have its flags read at once, such a module imports
what takes seconds inside its functions.
"""

import importlib
import inspect
from argparse import Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from common import Parser, at_least_1
from tiny import options as known

HERE = Path(__file__).parent
RECIPES = HERE.parents[1] / "recipes"
MAKERS = sorted(path.stem for path in HERE.glob("*.py") if (RECIPES / path.name).is_file())


@cache
def options_of(recipe: str) -> type[known.Options]:
    """Return the options of a maker; their docstring is what --help says."""
    name = "".join(word.capitalize() for word in recipe.split("_")) + "Options"
    if hasattr(known, name):
        return getattr(known, name)
    return importlib.import_module(f"tiny.{recipe}").Options


def make(recipe: str, folder: Path, words: Sequence[str] = ()) -> None:
    """Make the tiny model and rows of a recipe, as `make_tiny.py RECIPE FOLDER WORDS` does."""
    carry_out(parse([recipe, str(folder), *words]))


def parse(words: Sequence[str] | None, description: str | None = None) -> Namespace:
    """Return recipe, folder and options of a command line, by default of that of this process.

    Raises SystemExit with 64 for a wrong flag, after one line on stderr.
    """
    parser = Parser(
        prog="make_tiny.py",
        usage="make_tiny.py RECIPE FOLDER [options]",
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )
    recipes = parser.add_subparsers(
        dest="recipe", required=True, metavar="RECIPE", prog="make_tiny.py"
    )
    for recipe in MAKERS:
        add_parser(recipes, recipe)
    values = vars(parser.parse_args(words))
    recipe = values.pop("recipe")
    folder = values.pop("folder")
    options = options_of(recipe)(**values)
    return Namespace(recipe=recipe, folder=folder, options=options)


def carry_out(args: Namespace) -> None:
    """Write the model and the rows.

    Raises SystemExit with 65 for a text that cannot be read, with 73 for a folder that cannot be
    written, after one line on stderr.
    """
    module = importlib.import_module(f"tiny.{args.recipe}")
    module.make(args.folder, args.options)


def add_parser(recipes: Any, recipe: str) -> None:
    """Add a parser of the words that follow a recipe's name: the folder and the options.

    recipes: what ArgumentParser.add_subparsers returned.
    """
    kind = options_of(recipe)
    description = inspect.cleandoc(kind.__doc__ or "")
    parser = recipes.add_parser(
        recipe,
        usage=f"make_tiny.py {recipe} FOLDER [options]",
        help=description.splitlines()[0],
        description=description,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, help="where model/ and data/ are written")
    hints = get_type_hints(kind)
    for option in fields(kind):
        settings = argument_settings(option.name, hints[option.name], option.default)
        parser.add_argument(f"--{option.name}", help=option.metadata["help"], **settings)


def argument_settings(name: str, hint: Any, default: Any) -> dict[str, Any]:
    """Return what add_argument needs for a field of type int, float, bool, X | None or Literal."""
    if hint is bool:
        return {"action": "store_true"}
    if get_origin(hint) is Literal:
        return {"choices": get_args(hint), "default": default}
    if get_args(hint):
        hint = get_args(hint)[0]
    if hint is int and name != "seed":
        hint = at_least_1
    return {"type": hint, "default": default}
