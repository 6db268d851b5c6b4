# SPDX-License-Identifier: Apache-2.0
"""Start and stop the server of warm starts, from outside."""

import contextlib
import hashlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paths import ROOT

COMMAND = Path(__file__).with_name("__main__.py")
CLIENT = Path(__file__).with_name("python.py")
FILES = sorted(Path(__file__).parent.glob("*.py"))
PATIENCE = 10  # seconds until the server must listen
# Variables that are set only for the imports of the server
AT_IMPORT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    # Without it pyarrow starts a thread, and forking a process with threads is unsafe.
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def default_folder() -> Path:
    """Return the folder of a server that is started by hand; it changes when libraries change."""
    folders = [Path(folder) for folder in sys.path]
    packages = [path for path in folders if path.name == "site-packages" and path.is_dir()]
    changed = [path.stat().st_mtime_ns for path in (*packages, *FILES)]
    facts = repr((sys.executable, sys.version, str(ROOT), changed))
    key = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"warm-{os.getuid()}-{key}"


def is_served(folder: Path) -> bool:
    """Return whether the server of a folder accepts requests."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(folder / "socket"))
        except OSError:
            return False
    return True


def start(folder: Path | str | None = None, owner: int | None = None) -> Path:
    """Start the server in a folder, unless it runs; return the program that replaces python.

    This returns at once: clients wait for the imports.

    Args:
        owner: the id of a process whose end also ends the server; without one it ends after half
            an hour without a request.

    Raises:
        OSError: if warm starts are not possible.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError("warm starts need Linux")
    folder = Path(folder or default_folder())
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise OSError(f"{folder} belongs to somebody else")
    program = folder / "python"
    if is_served(folder):
        return program
    for path in folder.glob("socket*"):
        path.unlink()  # left behind by a server that was killed
    write_program(program)
    start_server(folder, owner)
    return program


def write_program(program: Path) -> None:
    """Write the program that replaces python.

    Raises:
        OSError: if its file system does not allow programs.
    """
    socket_path = program.with_name("socket")
    words = shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(socket_path)])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o700)
    if not os.access(program, os.X_OK):
        raise OSError(f"no program can be started from {program.parent}")


def start_server(folder: Path, owner: int | None) -> None:
    """Start the server, and wait until clients can connect.

    Raises:
        OSError: if it does not start.
    """
    command = [sys.executable, str(COMMAND), "serve", str(folder)]
    if owner:
        command.append(str(owner))
    with open(folder / "log", "w") as log:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | AT_IMPORT,
        )
    deadline = time.monotonic() + PATIENCE
    while not is_served(folder):
        if time.monotonic() > deadline:
            raise OSError(f"the server did not start: {(folder / 'log').read_text()[-300:]}")
        time.sleep(0.02)


def stop(folder: Path | None = None) -> None:
    """End the server of a folder; processes of its clients continue."""
    folder = Path(folder or default_folder())
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)
