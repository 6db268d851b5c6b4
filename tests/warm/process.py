# SPDX-License-Identifier: Apache-2.0
"""A process of a warm start: a fork of the server that runs as `python SCRIPT ...` would."""

import atexit
import contextlib
import os
import random
import resource
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rehearsal.exit_codes import FAILED, exit_code_of

EXIT_AT_ONCE = os._exit  # the original, even if a script replaces it


@dataclass(frozen=True)
class Request:
    """What `python *arguments` starts with: see warm_python.py."""

    arguments: list[str]
    environment: dict[str, str]
    folder: str
    umask: int
    namespaces: list[str]
    limits: dict[str, tuple[int, int]]


def become(request: Request, streams: Sequence[int], program: str) -> None:
    """Run as `python *arguments` would, and exit.

    Args:
        streams: the three file descriptors of its standard streams.
        program: its sys.executable, which makes its own children start warm too.
    """
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.umask(request.umask)
    set_limits(request.limits)
    os.environ.clear()
    os.environ.update(request.environment)
    forget_shared_state(program)
    if "PYTHONPATH" in request.environment:
        sys.path[0:0] = request.environment["PYTHONPATH"].split(os.pathsep)
    arguments = request.arguments
    unbuffered = arguments[0] == "-u"
    if unbuffered:
        arguments = arguments[1:]
    reopen_streams(unbuffered)
    end(run(arguments))


def set_limits(limits: dict[str, tuple[int, int]]) -> None:
    """Set the limits of the caller, as far as permitted: only root may raise one."""
    for name, (soft, hard) in limits.items():
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (soft, hard))


def forget_shared_state(program: str) -> None:
    """Reset the state that this process would share with all other forks of the server."""
    sys.executable = program
    tempfile.tempdir = None
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def reopen_streams(unbuffered: bool) -> None:
    """Buffer standard output and error as the interpreter does."""
    streams: list[Any] = [sys.stdout, sys.stderr]
    for stream in streams:
        by_line = stream.isatty() or stream is sys.stderr
        stream.reconfigure(write_through=unbuffered, line_buffering=by_line)


def run(arguments: list[str]) -> int:
    """Run a script, or a module after -m, as the interpreter does.

    Returns:
        The exit code; a negative one is a signal.
    """
    try:
        if arguments[0] == "-m":
            run_module(arguments[1:])
        else:
            run_script(arguments)
    except SystemExit as error:
        return exit_code_of(error)
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return FAILED
    return 0


def run_module(words: list[str]) -> None:
    """Run `python -m MODULE ...`."""
    # runpy would warn about modules that are already imported.
    warnings.filterwarnings("ignore", module="runpy")
    sys.argv = words
    sys.path.insert(0, os.getcwd())
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def run_script(words: list[str]) -> None:
    """Run `python SCRIPT ...`."""
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).resolve().parent))
    runpy.run_path(words[0], run_name="__main__")


def end(code: int) -> None:
    """Exit as the interpreter does: join threads, call exit functions, flush streams.

    Modules are not torn down one by one, which takes time and has no visible effect.

    Args:
        code: the exit code; a negative one is a signal.
    """
    try:
        threading._shutdown()  # pyrefly: ignore[missing-attribute]  # what the interpreter calls
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        EXIT_AT_ONCE(code & 255)
