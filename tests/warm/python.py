# SPDX-License-Identifier: Apache-2.0
"""The program that replaces `python` in a warm start: it requests a process from the server.

It forwards its arguments, environment, folder and open streams, then every signal, and ends as the
process ends. What cannot start warm is started by the interpreter itself, with a line that
says why. It imports very little, so that it starts fast.
"""

import json
import os
import signal
import socket
import sys

PASSED_ON = [getattr(signal, f"SIG{name}") for name in "TERM INT HUP QUIT USR1 USR2".split()]


class Signals:
    """Signals to this process, forwarded to the server's process as soon as there is one."""

    def __init__(self):
        self.process = None
        self.waiting = []
        for number in PASSED_ON:
            signal.signal(number, self.handle)

    def handle(self, number, frame):
        """Forward a signal, or keep it for later."""
        if self.process is None:
            self.waiting.append(number)
            return
        try:
            os.kill(self.process, number)
        except ProcessLookupError:
            pass  # Its status will arrive soon.

    def pass_on_to(self, process):
        """Forward the signals received so far, and all later ones, to a process."""
        self.process = process
        for number in self.waiting:
            self.handle(number, None)


def start_cold(arguments, reason=None):
    """Replace this process by the interpreter itself. A reason is printed to standard error."""
    if reason:
        print(f"warm: a cold start, since {reason}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *arguments])


def describe(arguments):
    """Everything that a process starts with, as JSON."""
    start = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    return json.dumps(start)


def end_as(status):
    """End this process as another one ended: with its code or, if negative, by its signal."""
    if status < 0:
        if -status != signal.SIGKILL:  # Python ignores some signals, and this forwards others
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def can_start_warm(arguments):
    """Whether the arguments run a script or a module, and not `python -c` or the like."""
    words = arguments[1:] if arguments[:1] == ["-u"] else arguments
    return bool(words) and (words[0] == "-m" or not words[0].startswith("-"))


def main():
    """Let the server run the arguments, and end as its process ends."""
    path, *arguments = sys.argv[1:]
    if not can_start_warm(arguments):
        start_cold(arguments)
    connection = socket.socket(socket.AF_UNIX)
    if connection.connect_ex(path):
        start_cold(arguments, "the server of tests/warm is gone")
    signals = Signals()
    socket.send_fds(connection, [b"."], [0, 1, 2])
    connection.sendall(describe(arguments).encode() + b"\n")
    answers = connection.makefile()
    answer = json.loads(answers.readline() or "{}")
    if "pid" not in answer:
        connection.close()
        start_cold(arguments, answer.get("cold", "the server of tests/warm has ended"))
    signals.pass_on_to(answer["pid"])
    end = json.loads(answers.readline() or "{}")
    if "status" not in end:
        sys.exit("warm: the server of tests/warm ended before this process did")
    end_as(end["status"])


if __name__ == "__main__":
    main()
