# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a rehearsal, forward signals to them, and end all of them if one refuses."""

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from types import FrameType

from rehearsal.exit_codes import refusal

POLL = 0.1  # seconds
MESSAGE_TIME = 0.5  # seconds that the message of a rank that refuses may take to be printed


class Launcher:
    """`accelerate launch` with its ranks.

    The first SIGINT or SIGTERM is forwarded to the ranks, so that the recipe can stop and save; a
    second one kills them. If a rank refuses, all are ended without the launcher's traceback.

    Args:
        folder: where the ranks leave their process ids and exit codes.
    """

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self.signals_received = 0
        self.process = subprocess.Popen(command, env=environment, start_new_session=True)

    def run(self) -> int:
        """Wait until all have ended, and return the launcher's exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.pass_on)
        while self.process.poll() is None:
            time.sleep(POLL)
            if refusal(self.folder) is not None:
                time.sleep(MESSAGE_TIME)
                self.send(signal.SIGKILL, [self.process.pid, *self.ranks()])
        return self.process.wait()

    def ranks(self) -> list[int]:
        """Return process ids of the ranks that have started."""
        return [int(path.read_text()) for path in self.folder.glob("pid.*")]

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal to the ranks, or to the launcher before there are any."""
        self.signals_received += 1
        if self.signals_received > 1:
            number = signal.SIGKILL
        self.send(number, self.ranks() or [self.process.pid])

    def send(self, number: int, processes: list[int]) -> None:
        """Send a signal to those processes that still exist."""
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
