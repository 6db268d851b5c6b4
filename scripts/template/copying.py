# SPDX-License-Identifier: Apache-2.0
"""The folder of a copied recipe."""

import shutil
from pathlib import Path

from template import origin
from template.imports import modules_needed

CONFIGS = "accelerate_configs"
REQUIREMENTS = "requirements.txt"
LICENSE = "LICENSE"
ORIGIN = "ORIGIN.md"


def find_recipes(root: Path) -> dict[str, Path]:
    """Return the recipes of a repository by name: the files in recipes/ that are programs."""
    recipes = {}
    for path in sorted((root / "recipes").glob("*.py")):
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8"):
            recipes[path.stem] = path
    return recipes


def copy_recipe(root: Path, recipe: Path, target: Path, command: str) -> list[Path]:
    """Write a recipe and what it needs to run; return the Python files, relative to `target`.

    The recipe keeps its name, which its docstring, its messages and the documents use. It also
    makes a diff with a newer version easier.

    Raises OSError if something cannot be written.
    """
    folder = recipe.parent
    modules = modules_needed(recipe)
    sources = [recipe, *modules]
    copies = [path.relative_to(folder) for path in sources]
    target.mkdir(parents=True, exist_ok=True)
    for source, copy in zip(sources, copies, strict=True):
        (target / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / copy)
    shutil.copytree(root / CONFIGS, target / CONFIGS)
    for name in (REQUIREMENTS, LICENSE):
        shutil.copyfile(root / name, target / name)

    commit = origin.find_commit(root, [*sources, root / CONFIGS, root / REQUIREMENTS])
    names = [copy.as_posix() for copy in copies[1:]]
    text = origin.describe(recipe.name, command, commit, names)
    (target / ORIGIN).write_text(text, encoding="utf-8")
    return copies
