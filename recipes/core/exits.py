# SPDX-License-Identifier: Apache-2.0
"""How a process ends: exit codes, from sysexits.h where it has a fitting one, and the last line.

This module imports nothing slow.
"""

import contextlib
import enum
import json
import os
import sys
import time
import traceback
from typing import NoReturn

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", RANK))
# The other ranks of a host find the same problem, and the first one is to report it
SECONDS_FOR_FIRST_RANK = 10


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
    DIFFERS = 76  # a merged or exported model does not say what the trained one says


class End(SystemExit):
    """The end of a run, which all ranks raise together.

    Attributes:
        code: the exit code.
        why: the reason, in one line.
        is_alone: whether this rank ends alone, and has printed why; a launcher ends the others.
    """

    def __init__(self, code: int, why: str, is_alone: bool = False) -> None:
        super().__init__(int(code), why, is_alone)  # with which it is pickled for other ranks
        self.code: int = int(code)  # pyrefly: ignore[bad-override]
        self.why = why
        self.is_alone = is_alone


def fail(code: int, *problems: str) -> NoReturn:
    """Print the problems and end this process with `code`. The launcher then ends other ranks."""
    if LOCAL_RANK > 0:
        time.sleep(SECONDS_FOR_FIRST_RANK)
    text = "\n".join(f"error: {problem}" for problem in problems)
    print(text, file=sys.stderr, flush=True)
    report_to_launcher(text)
    raise End(code, problems[0], is_alone=True)


def end_alone(end: End, error: BaseException | None, is_first: bool) -> None:
    """End this rank after an exception of its own. One process returns if Python is to print it.

    Args:
        is_first: whether no other rank has failed before. What follows from that is not printed.
    """
    is_only = int(os.environ.get("WORLD_SIZE", 1)) == 1
    if is_only and end.code == Exit.FAILED:
        return
    if is_first and not isinstance(error, End):
        if end.code == Exit.FAILED:
            traceback.print_exception(error)
        text = f"error: {end.why}"
        print(text, file=sys.stderr)
        report_to_launcher(text)
    if is_only:
        raise SystemExit(end.code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(end.code)  # Python would wait for the other ranks


def end_together(end: End) -> None:
    """Print why all ranks end, and end this one. Without a reason the run is done."""
    if not end.why:
        return
    text = end.why
    stream = sys.stdout
    if end.code not in (Exit.DONE, Exit.STOPPED):
        text = f"error: {end.why}"
        stream = sys.stderr
    if RANK == 0:
        print(text, file=stream, flush=True)
    report_to_launcher(text)
    raise SystemExit(end.code)


def report_to_launcher(text: str) -> None:
    """Have the report of torchrun, which is accelerate's launcher too, end with this text.

    The file has the format of torch's ErrorHandler (torch/distributed/elastic/multiprocessing/
    errors), whose `py_callstack` the launcher prints.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    with contextlib.suppress(OSError), open(path, "w") as file:
        json.dump({"message": {"message": text, "extraInfo": extra}}, file)


def print_without_failing() -> None:
    """Have stdout and stderr write an escape for a character that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # after a late redirection
            stream.reconfigure(errors="backslashreplace")  # pyrefly: ignore[missing-attribute]
