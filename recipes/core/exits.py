# SPDX-License-Identifier: Apache-2.0
"""Exit codes of every recipe and command, taken from sysexits.h where it has a fitting one."""

import contextlib
import enum
import sys


class Exit(enum.IntEnum):
    """Why a run ended.

    Launchers report every failure as 1; `exit_code` in OUTPUT_DIR/status.json is one of these.
    """

    DONE = 0
    FAILED = 1  # an exception that no message explains
    USAGE = 64  # wrong arguments, or ones that this machine or this strategy cannot run
    DATA = 65  # rows or checkpoints that cannot be used
    NO_HUB = 69  # the Hugging Face Hub, or a server, cannot be reached
    NOT_FINITE = 70  # the loss or the gradient is not finite
    CANNOT_WRITE = 73
    STOPPED = 75  # stopped and saved: the same command continues the run
    # A merged or exported model does not say what the trained one says, or an engine's gradient is
    # not the sum of what the ranks computed
    DIFFERS = 76


def print_without_failing() -> None:
    """Have stdout and stderr write an escape for a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # after a late redirection
            stream.reconfigure(errors="backslashreplace")  # pyrefly: ignore[missing-attribute]
