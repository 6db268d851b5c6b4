# SPDX-License-Identifier: Apache-2.0
"""How the planner ends early: with one line for the user and an exit code."""

import common
from common import Exit

LONGEST_REASON = 200  # characters


class PlannerError(Exception):
    """Anything that ends a call of the planner; `code` is the exit code of the command."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class UnplannableError(PlannerError):
    """The request cannot be planned: it is wrong, or the planner does not support it."""

    def __init__(self, message: str, code: int = Exit.USAGE) -> None:
        super().__init__(message, code)


class CannotWriteError(PlannerError):
    """A plan cannot be written to the requested path."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(f"cannot write {path}: {error}", Exit.CANNOT_WRITE)


def first_line(error: Exception) -> str:
    """Return the first line of an error's text, at most LONGEST_REASON characters of it."""
    return common.first_line(error)[:LONGEST_REASON]
