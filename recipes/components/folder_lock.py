# SPDX-License-Identifier: Apache-2.0
"""Keep two runs from writing into one output folder at the same time.

    OUTPUT_DIR/.run.lock    locked by the process of rank 0 as long as it lives; names that process

A second run would delete what the first one has staged of a checkpoint. The lock is POSIX's
(fcntl), which network file systems know too, and which ends with the process, however that ends.
"""

import errno
import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import IO, Any

from core.stop import HOST

NAME = ".run.lock"
# Rank 0 of a run whose launcher was killed still needs a moment to end.
SECONDS_ON_THIS_HOST = 10
# A server of NFSv4 keeps the locks of a host that was lost for up to 90 seconds (RFC 7530, 9.5).
SECONDS_ON_ANOTHER_HOST = 120
SECONDS_BETWEEN_TRIES = 0.2
HELD_BY_OTHERS = (errno.EACCES, errno.EAGAIN)


class FolderLock:
    """The lock of an output folder. Only rank 0 takes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._file: IO[str] | None = None

    def take(self) -> str | None:
        """Lock the folder, if it exists, until this process ends.

        A run that is ending is waited for. A file system without locks locks nothing, which is said
        once.

        Returns:
            Which other run has the folder, and what to do, or None.
        """
        if self._file is not None or not self._path.parent.is_dir():
            return None
        try:
            file = open(self._path, "a+")
        except OSError:  # The folder cannot be written to, which is reported later.
            return None
        began = time.monotonic()
        is_told = False
        while not self._try_to_lock(file):
            holder = read_holder(file)
            is_here = holder.get("host", HOST) == HOST
            seconds = SECONDS_ON_THIS_HOST if is_here else SECONDS_ON_ANOTHER_HOST
            if time.monotonic() - began >= seconds:
                file.close()
                return (
                    f"--output_dir {self._path.parent}: {name_of(holder)} is writing there: wait "
                    "until it has ended, or choose another --output_dir"
                )
            if not is_told:
                print(f"waiting up to {seconds} s until {name_of(holder)} has ended", flush=True)
                is_told = True
            time.sleep(SECONDS_BETWEEN_TRIES)
        write_holder(file)
        self._file = file
        return None

    def _try_to_lock(self, file: IO[str]) -> bool:
        """Lock a file, and return whether no other process has it locked.

        Where the file system has no locks, this says so.
        """
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD_BY_OTHERS:
                return False
            print(
                f"warning: --output_dir {self._path.parent}: its file system has no locks "
                f"({error.strerror}): make sure that no other run writes there, since it would not "
                "be refused",
                file=sys.stderr,
                flush=True,
            )
        return True


def read_holder(file: IO[str]) -> dict[str, Any]:
    """Return the host and the process that have locked a file, {} if they cannot be read."""
    file.seek(0)
    try:
        holder = json.loads(file.read())
    except (OSError, ValueError):
        return {}
    return holder if isinstance(holder, dict) else {}


def write_holder(file: IO[str]) -> None:
    """Write into a locked file which process has it. The lock does not depend on this."""
    try:
        file.truncate(0)
        file.write(json.dumps({"host": HOST, "process": os.getpid()}))
        file.flush()
    except OSError:  # The disk is full, for example.
        pass


def name_of(holder: dict[str, Any]) -> str:
    """Return the run that has a folder, in words."""
    if not holder:
        return "another run"
    return f"the run of process {holder.get('process')} on {holder.get('host')}"
