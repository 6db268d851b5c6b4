# SPDX-License-Identifier: Apache-2.0
"""What is done before and after a recipe's imports, so that a wrong call is refused at once."""

import gc
import sys
from types import TracebackType
from typing import TypeVar

from components import upstream
from components.arguments import DataArguments
from components.cli import parse_arguments
from components.meeting import leave_word, leaving_word
from components.roles import find_column_conflicts
from components.status import Ending, fail, process_status
from core.exits import Exit, print_without_failing

A = TypeVar("A")


def start(kind: type[A], description: str | None) -> A:
    """Return the command line as `kind`, and make the imports that follow faster.

    A wrong call ends here, within a second. A fifth of the time of imports would go to garbage
    collection, which finds nothing to collect: it pauses until `imports_are_done`.
    """
    print_without_failing()
    process_status().tell_other_hosts_by(leaving_word)
    sys.excepthook = on_early_exception
    arguments = parse_arguments(kind, description or "")
    if isinstance(arguments, DataArguments):
        problems = list(find_column_conflicts(arguments))
        if problems:
            fail(Exit.USAGE, *problems)
    gc.disable()
    upstream.start_faster()
    return arguments


def on_early_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an exception, such as a package that only this host lacks, and tell other hosts."""
    sys.__excepthook__(kind, error, trace)
    why = f"{kind.__name__}: {error}"
    leave_word(Ending.failed(Exit.FAILED, why))


def imports_are_done() -> None:
    """Resume garbage collection, and exempt from it what was imported."""
    gc.freeze()
    gc.enable()
