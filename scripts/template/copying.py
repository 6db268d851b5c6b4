# SPDX-License-Identifier: Apache-2.0
"""The folder of a copied recipe."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from template import origin
from template.imports import extras_of, modules_needed
from template.names import rename_files

COMPONENTS = "components/"
CONFIGS = "accelerate_configs"
REQUIREMENTS = "requirements.txt"
LICENSE = "LICENSE"
ORIGIN = "ORIGIN.md"
EXTRAS = re.compile(r"(\bEXTRAS: [^=]* = )\([^()]*\)")


def find_recipes(root: Path) -> dict[str, Path]:
    """Return the recipes of a repository by name: the files in recipes/ that are programs."""
    recipes = {}
    for path in sorted((root / "recipes").glob("*.py")):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            recipes[path.stem] = path
    return recipes


def copy_recipe(
    root: Path, recipe: Path, target: Path, command: str, extras: Sequence[str] | None = None
) -> list[Path]:
    """Write a recipe and what it needs to run; return the Python files, relative to `target`.

    The recipe keeps its name, which the documents use too and which makes a diff with a newer
    version easier. Names of files in comments and messages become those of the copy.

    Raises OSError if something cannot be written.

    Args:
        extras: those that the copy is to have; by default all that the recipe lists.
    """
    folder = recipe.parent
    listed = extras_of(recipe)
    extras = listed if extras is None else extras
    modules = modules_needed(recipe, extras)
    sources = [recipe, *modules]
    copies = [path.relative_to(folder) for path in sources]
    target.mkdir(parents=True, exist_ok=True)
    for source, copy in zip(sources, copies, strict=True):
        (target / copy).parent.mkdir(parents=True, exist_ok=True)
        copy_text(source, target / copy, recipe.stem)
    if tuple(extras) != listed:
        text = (target / recipe.name).read_text(encoding="utf-8")
        text = EXTRAS.sub(lambda found: f"{found[1]}{tuple(extras)}", text)
        (target / recipe.name).write_text(text, encoding="utf-8")
    shutil.copytree(root / CONFIGS, target / CONFIGS)
    copy_text(root / REQUIREMENTS, target / REQUIREMENTS, recipe.stem)
    shutil.copyfile(root / LICENSE, target / LICENSE)

    commit = origin.find_commit(root, [*sources, root / CONFIGS, root / REQUIREMENTS])
    names = [copy.as_posix() for copy in copies[1:]]
    text = origin.describe(recipe.name, command, commit, names)
    (target / ORIGIN).write_text(text, encoding="utf-8")
    return copies


def copy_text(source: Path, target: Path, recipe: str) -> None:
    """Copy a file, with its names of files changed to those of the copy of a recipe."""
    text = source.read_text(encoding="utf-8")
    target.write_text(rename_files(text, recipe), encoding="utf-8")
