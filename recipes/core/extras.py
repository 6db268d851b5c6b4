# SPDX-License-Identifier: Apache-2.0
"""The one seam to features that most runs do not need: recipes/extras/NAME/hooks.py.

A recipe lists the extras that it uses, as in `EXTRAS = ("configs", "mesh")`. The core calls their
hooks by name, and imports none of them.
"""

import importlib
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any


class InRun:
    """What an extra does during a run, by hooks that do nothing here.

    The hook `in_run(args)` returns one, or None if there is nothing to do. Where something is wrong
    it calls core.exits.fail; the methods raise an End.
    """

    def joined(self, accelerator: Any, group: Any, status: Any) -> None:
        """The ranks can talk to each other. Every rank calls this, and may end only with all.

        Args:
            group: of all ranks, whose calls may take days (`core.checkpoint.gather`).
            status: `core.stop.Status`, whose `end` records why the run fails.
        """

    def before_resume(self) -> None:
        """Rank 0 is about to look for the newest checkpoint in the output folder."""

    def saved(self, path: Path) -> Collection[int]:
        """A checkpoint is whole. Rank 0 calls this.

        Returns:
            The steps of checkpoints that are not to be deleted yet.
        """
        return ()

    def ended(self, is_done: bool) -> str | None:
        """How the run ends is recorded. Rank 0 calls this, and all ranks wait for it.

        Returns:
            Why a run that is done has failed nevertheless, or None.
        """
        return None


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


def first_of(extras: Sequence[str], name: str, *arguments: Any) -> Any:
    """Return what the first of the hooks of a name returns that returns anything, or None."""
    found = (hook(*arguments) for hook in hooks(extras, name))
    return next((result for result in found if result is not None), None)


def parts_of_run(args: Any) -> list[InRun]:
    """Return what the extras of a recipe do during a run."""
    parts = [in_run(args) for in_run in hooks(getattr(args, "EXTRAS", ()), "in_run")]
    return [part for part in parts if part is not None]
