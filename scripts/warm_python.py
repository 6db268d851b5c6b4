"""Stands in for `python` in a warm start: asks scripts/warm.py for a process that has imported the libraries.

Not called by hand: `warm.py` writes a program `python` that calls this file. It passes on its arguments, environment,
folder, limits and open streams, then every signal, and ends as the process ends. What cannot start warm is started by
the interpreter itself, with a line that says why. It imports next to nothing, since it has to be there at once.
"""

import json
import os
import resource
import signal
import socket
import sys

PASSED_ON = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def start_cold(arguments, reason=None):
    """Become the interpreter itself. The reason, if there is one to tell, goes to standard error."""
    if reason:
        print(f"warm: a cold start, since {reason}", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *arguments])


def namespaces():
    """Return the names of the namespaces that this process is in: its view of files, network, processes and users."""
    return [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "user")]


def describe(arguments):
    """Return all that a process starts with, as JSON."""
    umask = os.umask(0)
    os.umask(umask)
    start = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "umask": umask,
        "namespaces": namespaces(),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
    }
    return json.dumps(start)


def connect(path):
    """Return a connection to the server, or None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError:
        return None
    return connection


def end_as(status):
    """End this process as another one ended: with its code, or by its signal (a negative number)."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # one is enough
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


def main():
    path, *arguments = sys.argv[1:]
    words = arguments[1:] if arguments[:1] == ["-u"] else arguments
    if not words or words[0].startswith("-") and words[0] != "-m":
        start_cold(arguments)  # python -c and the like
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        path += ".deepspeed"
    connection = connect(path)
    if connection is None:
        start_cold(arguments, "the server of scripts/warm.py is gone")

    received = []
    for number in PASSED_ON:
        signal.signal(number, lambda number, frame: received.append(number))
    socket.send_fds(connection, [b"."], [0, 1, 2])
    connection.sendall(describe(arguments).encode() + b"\n")
    answers = connection.makefile()
    answer = json.loads(answers.readline() or "{}")
    if "cold" in answer:
        connection.close()
        for number in PASSED_ON:
            signal.signal(number, signal.SIG_DFL)
        start_cold(arguments, answer["cold"])
    if "pid" not in answer:
        start_cold(arguments, "the server of scripts/warm.py has ended")

    def pass_on(number, frame=None):
        try:
            os.kill(answer["pid"], number)
        except ProcessLookupError:
            pass  # it has ended, and its status is on the way

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    for number in received:
        pass_on(number)
    end = json.loads(answers.readline() or "{}")
    if "status" not in end:
        sys.exit("warm: the server of scripts/warm.py ended before this process did")
    end_as(end["status"])


if __name__ == "__main__":
    main()
