# SPDX-License-Identifier: Apache-2.0
"""The server of warm starts, which has imported the libraries and forks for each request."""

import contextlib
import gc
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paths import RECIPES, SCRIPTS
from warm.imports import (
    LATER,
    LATER_WITH_DEEPSPEED,
    import_libraries_of,
    import_modules,
    number_of_threads,
)
from warm.process import Request, become
from warm.python import namespaces

TESTS = Path(__file__).resolve().parents[1]
IDLE = 30 * 60  # seconds without a request after which a server without an owner ends
# Prefixes of variables that may differ between processes, since no library reads them when it is
# imported
FREE_VARIABLES = (
    "_",
    "COLUMNS",
    "LINES",
    "MAKE",
    "MFLAGS",
    "OLDPWD",
    "PATH",
    "PS1",
    "PWD",
    "SHLVL",
    "TERM",
    "TMPDIR",
    "VIRTUAL_ENV",
    "ACCELERATE_",
    "FSDP_",
    "JE_ARROW_MALLOC_CONF",
    "MIXED_PRECISION",
    "PARALLELISM_",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "GLOO_",
    "GROUP_",
    "LOCAL_",
    "MASTER_",
    "NCCL_",
    "RANK",
    "ROLE_",
    "TORCHELASTIC_",
    "TORCH_NCCL_",
    "WORLD_SIZE",
    "TOKENIZERS_PARALLELISM",
    # These are set by this project and its tests.
    "FAULT",
    "GPU_PROOF_",
    "PYTEST_",
    "REHEARSAL_",
    "TRIAL",
    "WARM_",
)


@dataclass(frozen=True)
class Job:
    """A process that runs for a client."""

    pid: int
    pidfd: int
    connection: socket.socket


class Server:
    """Forks processes for clients and reports how they ended.

    It has one thread, so that a fork is safe.

    Args:
        listener: the socket of the clients.
        program: sys.executable of the processes.
        at_start: the environment before the imports.
        owner: the id of a process whose end also ends this one, or None.
    """

    def __init__(
        self, listener: socket.socket, program: str, at_start: dict[str, str], owner: int | None
    ) -> None:
        self.listener = listener
        self.program = program
        self.at_start = at_start
        self.set_by_imports = {}  # variables that libraries set while they are imported
        for name, value in os.environ.items():
            if at_start.get(name) != value:
                self.set_by_imports[name] = value
        self.namespaces = namespaces()
        self.owner = os.pidfd_open(owner) if owner else None
        self.jobs = {}
        self.selector = selectors.DefaultSelector()

    def serve(self) -> None:
        """Answer requests until the owner ends or, without an owner, until IDLE seconds pass."""
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        if self.owner:
            self.selector.register(self.owner, selectors.EVENT_READ, sys.exit)
        patience = None if self.owner else IDLE
        while True:
            events = self.selector.select(patience)
            if not events and not self.jobs:
                return
            for key, _ in events:
                key.data()

    def accept(self) -> None:
        """Read the request of a new client."""
        connection, _ = self.listener.accept()
        streams = []
        try:
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            request = Request(**json.loads(connection.makefile().readline()))
        except (OSError, ValueError, TypeError):
            connection.close()  # The client was killed meanwhile, or has another version.
        else:
            self.decide(request, streams, connection)
        for stream in streams:
            os.close(stream)

    def decide(self, request: Request, streams: Sequence[int], connection: socket.socket) -> None:
        """Fork the process, or answer why the client must start it cold."""
        reason = self.reason_for_cold(request)
        print(f"cold: {reason}" if reason else "warm", flush=True)
        if reason:
            send(connection, cold=reason)
            connection.close()
        else:
            self.fork(request, streams, connection)

    def reason_for_cold(self, request: Request) -> str | None:
        """Why a fork of this server would differ from what is requested, or None."""
        if request.namespaces != self.namespaces:
            return "it is in namespaces of its own"
        different = self.different_variables(request)
        if different:
            return f"the libraries were imported with another value of {', '.join(different)}"
        return None

    def different_variables(self, request: Request) -> list[str]:
        """Return names of variables that would have made a difference to the imports."""
        environment = dict(request.environment)
        if environment.get("PYTHONPATH") == request.folder:
            del environment["PYTHONPATH"]  # accelerate adds it for DeepSpeed
        names = {*environment, *self.at_start}
        return [name for name in sorted(names) if self.differs(name, environment.get(name))]

    def differs(self, name: str, value: str | None) -> bool:
        """Return whether a variable with this value would have made a difference to the imports."""
        if value in (self.at_start.get(name), self.set_by_imports.get(name)):
            return False
        if name == "CUDA_VISIBLE_DEVICES":
            return has_gpu()
        if name == "DS_ACCELERATOR":
            return "deepspeed" in sys.modules
        return not name.startswith(FREE_VARIABLES)

    def fork(self, request: Request, streams: Sequence[int], connection: socket.socket) -> None:
        """Start a process for a client."""
        pid = os.fork()
        if pid == 0:
            self.close_in_child(connection)
            request.environment.update(self.set_by_imports)
            become(request, streams, self.program)
        job = Job(pid, os.pidfd_open(pid), connection)
        self.jobs[pid] = job
        self.selector.register(job.pidfd, selectors.EVENT_READ, lambda: self.report_end(job))
        self.selector.register(connection, selectors.EVENT_READ, lambda: self.kill_abandoned(job))
        send(connection, pid=pid)

    def close_in_child(self, connection: socket.socket) -> None:
        """Close the server's sockets and descriptors in a new process."""
        self.selector.close()
        self.listener.close()
        connection.close()
        for job in self.jobs.values():
            job.connection.close()
            os.close(job.pidfd)
        if self.owner:
            os.close(self.owner)

    def report_end(self, job: Job) -> None:
        """Report to a client how its process ended."""
        _, status = os.waitpid(job.pid, 0)
        send(job.connection, status=os.waitstatus_to_exitcode(status))
        self.selector.unregister(job.pidfd)
        with contextlib.suppress(KeyError):
            self.selector.unregister(job.connection)
        os.close(job.pidfd)
        job.connection.close()
        del self.jobs[job.pid]

    def kill_abandoned(self, job: Job) -> None:
        """End a process whose client was killed."""
        self.selector.unregister(job.connection)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def send(connection: socket.socket, **content: str | int) -> None:
    """Send a line of JSON, if the client is still connected."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(content).encode() + b"\n")


def has_gpu() -> bool:
    """Return whether this machine has a GPU of NVIDIA or AMD."""
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")


def listen(path: Path) -> socket.socket:
    """Return a socket to which clients can connect from now on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def serve(folder: Path, owner: int | None) -> None:
    """Import the libraries and serve at `folder`/socket; a fork serves at socket.deepspeed."""
    at_start = dict(os.environ)
    (folder / "pid").write_text(str(os.getpid()))
    plain = listen(folder / "socket")
    with_deepspeed = listen(folder / "socket.deepspeed")
    leave_project()
    import_libraries_of(RECIPES, [SCRIPTS])
    import_modules(LATER)
    first = os.getpid()
    if os.fork() == 0:
        import_modules(LATER_WITH_DEEPSPEED)
        plain.close()
        listener = with_deepspeed
        owner = first
    else:
        with_deepspeed.close()
        listener = plain
    if number_of_threads() > 1:
        sys.exit("the imports have started a thread, which makes forks unsafe")
    gc.collect()
    gc.freeze()  # Collections in forks would only copy the pages of these objects.
    Server(listener, str(folder / "python"), at_start, owner).serve()


def leave_project() -> None:
    """Remove this project from the imported modules and from the import path.

    A process that is forked from this one reads the files again, so that an edit takes effect.
    """
    own = (f"{RECIPES}/", f"{SCRIPTS}/", f"{TESTS}/")
    sys.path[:] = [folder for folder in sys.path if not f"{folder}/".startswith(own)]
    for name, module in list(sys.modules.items()):
        file = str(vars(module).get("__file__"))
        if name != "__main__" and file.startswith(own):
            del sys.modules[name]
