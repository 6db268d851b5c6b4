# SPDX-License-Identifier: Apache-2.0
"""How a command ends when it cannot do what was requested: one line on stderr, and an exit code."""

import sys
from typing import NoReturn

import paths  # noqa: F401  makes recipes/ importable
from components.exits import Exit


def stop(code: Exit, message: str) -> NoReturn:
    """End the process with a code after one line on stderr."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(int(code))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error's type where it has no message."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0]
