# SPDX-License-Identifier: Apache-2.0
"""How a command ends: with an exit code, and one line on stderr if it cannot do what was requested.

A command whose output nobody reads any more, as with `| head`, ends in silence.
"""

import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import paths  # noqa: F401  makes recipes/ importable
from core.exits import Exit, print_without_failing


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


def run_command(main: Callable[[], int | None]) -> NoReturn:
    """Run the main function of a command, and end the process with the exit code that it returns.

    If the reader of its output has closed the pipe, the code is that of a program which the signal
    SIGPIPE ended, as a shell has it. The signal itself is not used: it would also end commands that
    lose a connection to a server or to a process of their own.
    """
    print_without_failing()
    try:
        code: Any
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        # Here, since the interpreter would print a traceback if it failed at its end
        sys.stdout.flush()
    except BrokenPipeError:
        if has_reader():
            raise
        # What is still in the buffer goes nowhere, and not into the closed pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def has_reader() -> bool:
    """Return whether what is written to stdout may still be read."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    lost = select.POLLERR | select.POLLHUP
    return not any(event & lost for _, event in poll.poll(0))
