"""The first and the last thing about imports: wrong calls are told before they take seconds."""

import gc
from typing import TypeVar

from components import upstream
from components.cli import parse_arguments

A = TypeVar("A")


def start(kind: type[A], description: str | None) -> A:
    """Return the command line as `kind`, and make the imports that follow faster.

    A wrong call ends here, within a second. A fifth of the time of imports is spent looking for
    garbage, of which they make none: the collector pauses until `imports_are_done`.
    """
    arguments = parse_arguments(kind, description or "")
    gc.disable()
    upstream.start_faster()
    return arguments


def imports_are_done() -> None:
    """Resume garbage collection, which need not look at what was imported."""
    gc.freeze()
    gc.enable()
