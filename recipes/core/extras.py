# SPDX-License-Identifier: Apache-2.0
"""The one seam to features that most runs do not need: recipes/extras/NAME/hooks.py.

A recipe lists the extras that it uses, as in `EXTRAS = ("configs", "mesh")`. The core calls their
hooks by name, and imports none of them.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any


def find_missing(extras: Sequence[str]) -> Iterator[str]:
    """Yield a reason for each listed extra that is not there."""
    for name in extras:
        if find_spec(f"extras.{name}") is None:
            yield (
                f"this recipe lists the extra {name!r}, but extras/{name} is not there: copy that "
                "folder, or take the name off EXTRAS"
            )


def hooks(extras: Sequence[str], name: str) -> list[Callable[..., Any]]:
    """Return the hooks of a name, in the order in which a recipe lists its extras."""
    modules = [importlib.import_module(f"extras.{extra}.hooks") for extra in extras]
    return [getattr(module, name) for module in modules if hasattr(module, name)]
