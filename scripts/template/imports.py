# SPDX-License-Identifier: Apache-2.0
"""The modules that a program imports from its own folder, found without running it.

Imports inside functions count. What is imported by a name that is only known when the program runs
is not found, but for the extras that a recipe lists.
"""

import ast
from collections.abc import Sequence
from modulefinder import ModuleFinder
from pathlib import Path


def modules_needed(program: Path, extras: Sequence[str] | None = None) -> list[Path]:
    """Return the files beside a program, or in packages beside it, that it reaches by imports.

    Sorted, without the program itself.

    Args:
        extras: names of the extras that come along; by default those that it lists.
    """
    finder = ModuleFinder(path=[str(program.parent)])
    finder.run_script(str(program))
    for name in extras_of(program) if extras is None else extras:
        finder.import_hook(f"extras.{name}.hooks")
    files = {getattr(module, "__file__", None) for module in finder.modules.values()}
    return sorted({Path(file) for file in files if file} - {program})


def extras_of(program: Path) -> tuple[str, ...]:
    """Return the names in EXTRAS of the arguments of a recipe; () for another program."""
    for node in ast.walk(ast.parse(program.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS":
            return ast.literal_eval(node.value)
    return ()
