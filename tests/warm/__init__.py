# SPDX-License-Identifier: Apache-2.0
"""Warm starts of the launches of tests: forks of a process that has imported the libraries.

Half of the time of a short launch goes into imports, in each of its processes. A server (server.py)
imports the libraries once and forks a process for each request of a program (python.py) that takes
the place of `python`. No file of this project is imported in advance, so that an edit takes effect
at once. A start falls back to the interpreter itself, and prints why, where a warm process would
differ: a variable that the libraries read while they were imported has another value, or the server
is gone.

Some differences remain: the process is a child of the server and shows the server's command line
and environment in /proc, its memory contains the server's pages, hashes of strings are salted as in
the server, and warnings of imports are not printed. Tests of such things start cold.
"""

import os
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
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


def start(folder, owner):
    """Start the server in a folder; return the program that replaces python.

    This returns at once: clients wait for the imports.

    Args:
        owner: the id of a process whose end also ends the server.

    Raises:
        OSError: if warm starts are not possible.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError("warm starts need Linux")
    program = Path(folder, "python")
    client = [sys.executable, "-I", "-S", str(HERE / "python.py"), str(Path(folder, "socket"))]
    program.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    program.chmod(0o700)
    if not os.access(program, os.X_OK):
        raise OSError(f"no program can be started from {folder}")
    command = [sys.executable, str(HERE / "server.py"), str(folder), str(owner)]
    environment = os.environ | AT_IMPORT
    with open(Path(folder, "log"), "w") as log:
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment,
        )
    deadline = time.monotonic() + PATIENCE
    while not is_served(folder):
        if time.monotonic() > deadline:
            raise OSError(f"the server did not start: {Path(folder, 'log').read_text()[-300:]}")
        time.sleep(0.02)
    return program


def is_served(folder):
    """Whether the server of a folder accepts requests."""
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(Path(folder, "socket"))) == 0
