# SPDX-License-Identifier: Apache-2.0
"""Whether the hosts of a run share a folder."""

import contextlib
import secrets
import time
from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from core.stop import HOST

SECONDS_FOR_FILE = 10  # A network file system may show a new file to other hosts this much later.


def find_host_without(
    accelerator: Accelerator, folder: Path, seconds: float = SECONDS_FOR_FILE
) -> str | None:
    """Return the name of a host that does not see what rank 0 writes, or None.

    Every rank takes part. The folder exists on every host; nothing is left in it.

    Args:
        seconds: for which a host waits to see it.
    """
    name = broadcast_object_list([f".seen-by-all-hosts-{secrets.token_hex(8)}"])[0]
    file = folder / name
    if accelerator.is_main_process:
        with contextlib.suppress(OSError):  # Then no host sees it.
            file.touch()
    accelerator.wait_for_everyone()
    found = gather_object([(HOST, appears(file, seconds))])
    if accelerator.is_main_process:
        with contextlib.suppress(OSError):  # A file that is left does no harm.
            file.unlink()
    hosts = [host for host, is_there in found if not is_there]
    return hosts[0] if hosts else None


def appears(file: Path, seconds: float = SECONDS_FOR_FILE) -> bool:
    """Return whether a file is there, now or within some seconds."""
    until = time.monotonic() + seconds
    while not file.exists():
        if time.monotonic() > until:
            return False
        time.sleep(0.2)
    return True
