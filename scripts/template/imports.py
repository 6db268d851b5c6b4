# SPDX-License-Identifier: Apache-2.0
"""The modules that a program imports from its own folder, found without running it.

Imports inside functions count. What is imported by a name that is only known when the program runs
(importlib.import_module) is not found, but for the extras that a recipe lists.
"""

import ast
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path


def modules_needed(program: Path, extras: Sequence[str] | None = None) -> list[Path]:
    """Return the files beside a program, or in packages beside it, that it reaches by imports.

    Sorted, without the program itself.

    Args:
        extras: names of the extras that come along; by default those that it lists.
    """
    folder = program.parent
    needed: set[Path] = set()
    to_read = [program]
    for name in extras_of(program) if extras is None else extras:
        hooks = set(files_of(["extras", name, "hooks"], folder))
        needed |= hooks
        to_read += sorted(hooks)
    while to_read:
        for path in local_imports(to_read.pop(), folder):
            if path != program and path not in needed:
                needed.add(path)
                to_read.append(path)
    return sorted(needed)


def extras_of(program: Path) -> tuple[str, ...]:
    """Return the names in EXTRAS of the arguments of a recipe; () for another program."""
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS":
            return ast.literal_eval(node.value)
    return ()


def local_imports(path: Path, folder: Path) -> set[Path]:
    """Return what a file of a folder imports from there, packages' __init__.py included."""
    package = path.parent.relative_to(folder).parts
    return files_imported(path.read_text(encoding="utf-8"), package, folder)


@functools.cache
def files_imported(text: str, package: tuple[str, ...], folder: Path) -> set[Path]:
    """Return the files of a folder that a program in one of its packages imports.

    Cached, since recipes that are copied one after the other share most of their modules.
    """
    found: set[Path] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.update(files_of(alias.name.split("."), folder))
        elif isinstance(node, ast.ImportFrom):
            module = absolute_name(node, package)
            for alias in node.names:
                found.update(files_of([*module, alias.name], folder))
    return found


def absolute_name(node: ast.ImportFrom, package: tuple[str, ...]) -> list[str]:
    """Return the parts of the name that `from ... import` gives, which may be relative."""
    parts = []
    if node.level > 0:
        outer = len(package) - (node.level - 1)
        parts += package[:outer]
    if node.module is not None:
        parts += node.module.split(".")
    return parts


def files_of(parts: list[str], folder: Path) -> Iterator[Path]:
    """Yield the file of each part of a dotted name: `a.b.c` imports a, a.b and perhaps a.b.c.

    The last part may be a name in the module, and the whole name may be of an installed package.
    Such parts have no file in the folder.
    """
    for length in range(1, len(parts) + 1):
        path = folder.joinpath(*parts[:length])
        for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
            if file.is_file():
                yield file
