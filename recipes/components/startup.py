# SPDX-License-Identifier: Apache-2.0
"""What is done before and after a recipe's imports, so that a wrong call is refused at once."""

import gc
from typing import TypeVar

from components.cli import parse_arguments
from core.exits import print_without_failing

A = TypeVar("A")


def start(kind: type[A], description: str | None) -> A:
    """Return the command line as `kind`.

    A wrong call ends here, within a second. A fifth of the time of imports would go to garbage
    collection, which finds nothing to collect: it pauses until `imports_are_done`.
    """
    print_without_failing()
    arguments = parse_arguments(kind, description or "")
    gc.disable()
    return arguments


def imports_are_done() -> None:
    """Resume garbage collection, and exempt from it what was imported."""
    gc.freeze()
    gc.enable()
