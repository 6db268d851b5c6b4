"""Exit codes of every recipe and command, after sysexits.h where it has one."""

import enum


class Exit(enum.IntEnum):
    """What the exit code of a run says.

    Launchers flatten all failures to 1; `exit_code` in OUTPUT_DIR/status.json keeps these.
    """

    DONE = 0
    FAILED = 1  # an exception that no message explains
    USAGE = 64  # wrong arguments, or ones that this machine or this strategy cannot run
    DATA = 65  # rows or checkpoints that cannot be used
    NO_HUB = 69  # the Hugging Face Hub cannot be reached
    NOT_FINITE = 70  # the loss or the gradient is not finite
    CANNOT_WRITE = 73
    STOPPED = 75  # stopped and saved: the same command continues the run
