# SPDX-License-Identifier: Apache-2.0
"""The program that replaces `python` in a warm start: it requests a process from the server.

It is not meant to be called by hand: `warm.start` writes a program `python` that calls this
file. It forwards its arguments, environment, folder, limits and open streams, then every signal,
and ends as the process ends. What cannot start warm is started by the interpreter itself, with a
line that says why. It imports very little, so that it starts fast.
"""

import json
import os
import resource
import signal
import socket
import sys
from types import FrameType
from typing import NoReturn, TextIO

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


class Signals:
    """Signals to this process, forwarded to the server's process as soon as there is one."""

    def __init__(self) -> None:
        self.process: int | None = None
        self.waiting: list[int] = []
        for number in PASSED_ON:
            signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Forward a signal, or keep it for later."""
        if self.process is None:
            self.waiting.append(number)
        else:
            send_signal(self.process, number)

    def pass_on_to(self, process: int) -> None:
        """Forward the signals received so far, and all later ones, to a process."""
        self.process = process
        for number in self.waiting:
            send_signal(process, number)


def send_signal(process: int, number: int) -> None:
    """Send a signal to a process. If it has ended, its status will arrive soon."""
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass


def start_cold(arguments: list[str], reason: str | None = None) -> NoReturn:
    """Replace this process by the interpreter itself. A reason is printed to standard error."""
    if reason:
        print(f"warm: a cold start, since {reason}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *arguments])


def namespaces() -> list[str]:
    """Return the namespaces of this process: its view of files, network, processes and users."""
    return [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")]


def describe(arguments: list[str]) -> str:
    """Return everything that a process starts with, as JSON."""
    umask = os.umask(0)
    os.umask(umask)
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS}
    start = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "namespaces": namespaces(),
        "limits": limits,
    }
    return json.dumps(start)


def connect(path: str) -> socket.socket | None:
    """Return a connection to the server, or None if there is no server."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        return None
    return connection


def read_answer(answers: TextIO) -> dict:
    """Return the next answer of the server, empty if it has ended."""
    return json.loads(answers.readline() or "{}")


def end_as(status: int) -> NoReturn:
    """End this process as another one ended: with its code or, if negative, by its signal."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # The other process dumped core already.
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def can_start_warm(arguments: list[str]) -> bool:
    """Return whether the arguments run a script or a module, and not `python -c` or the like."""
    words = arguments
    if words[:1] == ["-u"]:
        words = words[1:]
    return bool(words) and (words[0] == "-m" or not words[0].startswith("-"))


def main() -> None:
    """Let the server run the arguments, and end as its process ends."""
    path, *arguments = sys.argv[1:]
    if not can_start_warm(arguments):
        start_cold(arguments)
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        path += ".deepspeed"
    connection = connect(path)
    if connection is None:
        start_cold(arguments, "the server of tests/warm is gone")
    signals = Signals()
    socket.send_fds(connection, [b"."], [0, 1, 2])
    connection.sendall(describe(arguments).encode() + b"\n")
    answers = connection.makefile()
    answer = read_answer(answers)
    if "pid" not in answer:
        connection.close()
        start_cold(arguments, answer.get("cold", "the server of tests/warm has ended"))
    signals.pass_on_to(answer["pid"])
    end = read_answer(answers)
    if "status" not in end:
        sys.exit("warm: the server of tests/warm ended before this process did")
    end_as(end["status"])


if __name__ == "__main__":
    main()
