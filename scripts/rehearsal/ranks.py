# SPDX-License-Identifier: Apache-2.0
"""How rehearse.py starts its ranks, passes signals on to them, and finds their exit code.

A launcher turns every failure into 1 and a traceback. Each rank therefore records its code in a
file of a shared folder. A rank that ends with a code of the recipes ends with 0 for the launcher,
which waits for the others; one that fails in another way ends with its real code, for which the
launcher stops them.
"""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

# The codes of core.exits, whose names cannot be imported here: in each rank the recipe has to
# find its own modules, which a copy has beside it.
# Done, usage, data, no hub, not finite, cannot write, stopped and saved, differs
CLEAN_EXITS = (0, 64, 65, 69, 70, 73, 75, 76)
REFUSALS = (64, 65, 69)  # usage, data, no hub: one rank's word is enough
FAILED = 1
NOT_AS_PROMISED = 78  # EX_CONFIG of sysexits.h: no recipe ends with it
POLL = 0.1  # seconds
MESSAGE_TIME = 0.5  # seconds that the message of a rank that refuses may take to be printed


def record(code: int, path: Path) -> int:
    """Record how a rank ends in a file, and return the code that the launcher gets."""
    if path.parent.is_dir():  # Otherwise the rehearsal has ended before its ranks
        path.write_text(str(code))
    return 0 if code in CLEAN_EXITS else code


def recorded_codes(folder: Path) -> list[int]:
    """Return the codes that ranks have recorded so far."""
    texts = [path.read_text() for path in folder.glob("exit.*")]
    return [int(text) for text in texts if text]  # The others are being written


def refusal(folder: Path) -> int | None:
    """Return the code with which a rank refused to run, or None."""
    return next((code for code in recorded_codes(folder) if code in REFUSALS), None)


def launch(command: list[str], environment: dict[str, str], folder: Path, ranks: int) -> int:
    """Run `accelerate launch` until it has ended, and return the exit code of the rehearsal.

    That is one rank's refusal, or the clean exit on which all agree, or else FAILED. The first
    SIGINT or SIGTERM is forwarded to the ranks, so that the recipe can stop and save; a second one
    kills them. If a rank refuses, all are ended without the launcher's traceback.

    Args:
        folder: where the ranks leave their process ids and exit codes.
        ranks: how many of them this machine starts.
    """
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    received = []

    def send(number: int, processes: list[int]) -> None:
        for one in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, number)

    def started() -> list[int]:
        return [int(path.read_text()) for path in folder.glob("pid.*")]

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        # To the launcher before there are any ranks
        send(signal.SIGKILL if len(received) > 1 else number, started() or [process.pid])

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    while process.poll() is None:
        time.sleep(POLL)
        if refusal(folder) is not None:
            time.sleep(MESSAGE_TIME)
            send(signal.SIGKILL, [process.pid, *started()])
    launcher_code = process.wait()
    refused = refusal(folder)
    if refused is not None:
        return refused
    code, *others = recorded_codes(folder) or [FAILED]
    if code in CLEAN_EXITS and others == [code] * (ranks - 1) and (code or not launcher_code):
        return code
    return FAILED
