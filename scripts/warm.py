"""Warm starts: processes that have imported torch and its friends before they are asked for.

    python scripts/rehearse.py --warm --config_file accelerate_configs/fsdp.yaml recipes/llama.py ...
    python scripts/warm.py start     # print the name of a program that is used as `python` is; start its server
    python scripts/warm.py stop

Half of the time of a short launch is imports, in each of its processes again. A server imports the libraries once and
forks a process for each request. That process is what `python SCRIPT ...` or `python -m MODULE ...` would have been,
with the same arguments, environment, folder, limits and streams, and its own children start warm too, since its
sys.executable is the program above. Files of this project are never imported by the server: an edit counts at once.

A start falls back to the interpreter itself, and says why, where it would differ: a variable that the libraries read
while they were imported has another value, or the server is gone. What differs all the same: the process is a child of
the server, with the server's command line and environment in /proc, its memory contains the server's pages, hashes of
texts are salted as the server's are, and warnings of imports are not printed. So tests of such things start cold, and
tests/launch/test_warm.py compares a warm with a cold launch under each engine, bit for bit.

For Linux, and for CPU ranks: where there is a GPU, CUDA_VISIBLE_DEVICES has to be empty.
"""

import argparse
import ast
import atexit
import contextlib
import gc
import hashlib
import importlib
import json
import os
import random
import resource
import runpy
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

from warm_python import namespaces

ROOT = Path(__file__).resolve().parents[1]
CLIENT = Path(__file__).with_name("warm_python.py")
EXIT_AT_ONCE = os._exit  # itself, whatever a script puts in its place
IDLE = 30 * 60  # seconds without a request after which a server that was started by hand ends
# Set for the imports alone
AT_IMPORT = {
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # else pyarrow starts a thread, and forks of threads are unsafe
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# How the names of variables begin that a process may have of its own, since no library reads them at import
OWN = (
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
    "FAULT",
    "GPU_PROOF_",
    "PYTEST_",
    "REHEARSAL_",
    "TRIAL",
    "WARM_",  # of this project and its tests
)
# What recipes and their libraries import while they run. One that is missing here costs time and nothing else.
LATER = (
    "accelerate.commands.launch",
    "torch.distributed.run",
    "torch.distributed.launcher.api",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.nn.attention.varlen",
    "numpy.ctypeslib",
    "einops",
    "hjson",
    "msgpack",
    "pydantic",
    "encodings.idna",
    "bitsandbytes",
    "peft.tuners.lora.bnb",
    "peft.utils.transformers_weight_conversion",
    "transformers.integrations.bitsandbytes",
    *(
        f"transformers.models.{name}.modeling_{name}"
        for name in ("bert", "llama", "mistral", "mixtral", "t5", "vit")
    ),
)
LATER_WITH_DEEPSPEED = (
    "deepspeed",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.moe.ep_experts",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._subclasses.schema_check_mode",
)


# ---- The imports ----


def library_imports(folder):
    """Yield the statements by which the files of a folder import libraries, as source text."""
    own = {path.stem for path in [*folder.glob("*.py"), *Path(__file__).parent.glob("*.py")]}
    for path in sorted(folder.glob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ImportFrom):
                names = [statement.module]
            elif isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                continue
            if not own.intersection(name.partition(".")[0] for name in names):
                yield ast.unparse(statement)


def import_libraries(names=(), folder=None):
    """Import what the recipes in a folder import, and modules by their names. What is not there is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for statement in library_imports(folder) if folder else ():
            with contextlib.suppress(ImportError):
                exec(statement, {})
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def number_of_threads():
    return len(os.listdir("/proc/self/task"))


# ---- In a process that was asked for ----


class Request(NamedTuple):
    """What `python *arguments` starts with: see warm_python.py."""

    arguments: list
    environment: dict
    folder: str
    umask: int
    namespaces: list
    limits: dict


def become(request, streams, program):
    """Be what `python *arguments` would have been, and end. streams: its three file descriptors."""
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request.folder)
    os.umask(request.umask)
    for name, limit in request.limits.items():
        with contextlib.suppress(ValueError, OSError):  # only root may raise one
            resource.setrlimit(getattr(resource, name), tuple(limit))
    os.environ.clear()
    os.environ.update(request.environment)
    forget(program)
    if "PYTHONPATH" in request.environment:
        sys.path[0:0] = request.environment["PYTHONPATH"].split(os.pathsep)
    arguments = request.arguments
    unbuffered = arguments[0] == "-u"
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(
            write_through=unbuffered, line_buffering=stream.isatty() or stream is sys.stderr
        )
    end(code_of(arguments[unbuffered:]))


def forget(program):
    """Take back what this process would share with all others of its server: names of files and random numbers."""
    sys.executable = program
    tempfile.tempdir = None
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()


def code_of(arguments):
    """Run a script, or a module after -m, as the interpreter does. Returns the exit code."""
    try:
        if arguments[0] == "-m":
            warnings.filterwarnings(
                "ignore", module="runpy"
            )  # which warns of a module that is there already
            sys.argv = arguments[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def end(code):
    """End as the interpreter does: threads joined, what was registered called, files flushed. Modules are not taken
    apart one by one. A negative code is a signal."""
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        if code < 0:
            signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        EXIT_AT_ONCE(code & 255)


# ---- The server ----


class Job(NamedTuple):
    """A process that runs for a client."""

    pid: int
    pidfd: int
    connection: socket.socket


class Server:
    """Forks processes for clients and tells them how they ended. It has one thread, so that a fork is safe.

    listener: the socket of clients. program: what the processes have as sys.executable. at_start: the environment
    before the imports. owner: a process with which this one ends.
    """

    def __init__(self, listener, program, at_start, owner):
        self.listener, self.program, self.at_start = listener, program, at_start
        # Some libraries set variables while they are imported
        self.set_by_imports = {
            name: value for name, value in os.environ.items() if at_start.get(name) != value
        }
        self.namespaces = namespaces()
        self.owner = os.pidfd_open(owner) if owner else None
        self.jobs = {}
        self.selector = selectors.DefaultSelector()

    def serve(self):
        """Answer requests until the owner ends or, without one, until there was nothing to do for a while."""
        self.selector.register(self.listener, selectors.EVENT_READ, self.accept)
        if self.owner:
            self.selector.register(self.owner, selectors.EVENT_READ, sys.exit)
        while True:
            events = self.selector.select(None if self.owner else IDLE)
            if not events and not self.jobs:
                return
            for key, _ in events:
                key.data()

    def accept(self):
        connection, _ = self.listener.accept()
        streams = []
        try:
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            request = Request(**json.loads(connection.makefile().readline()))
        except (
            OSError,
            ValueError,
            TypeError,
        ):  # a client that was killed meanwhile, or of another version
            connection.close()
        else:
            self.decide(request, streams, connection)
        for stream in streams:
            os.close(stream)

    def decide(self, request, streams, connection):
        """Fork the process, or answer why its client has to start it cold."""
        reason = self.reason_for_cold(request)
        print(f"cold: {reason}" if reason else "warm", flush=True)
        if reason:
            send(connection, cold=reason)
            connection.close()
        else:
            self.fork(request, streams, connection)

    def reason_for_cold(self, request):
        """Return what a fork of this server would have otherwise than the process that is asked for, or None."""
        if request.namespaces != self.namespaces:
            return "it is in namespaces of its own"
        different = self.different_variables(request)
        if different:
            return f"the libraries were imported with another value of {', '.join(different)}"
        return None

    def different_variables(self, request):
        """Return the names of variables that would have made a difference to the imports."""
        environment = dict(request.environment)
        if environment.get("PYTHONPATH") == request.folder:
            del environment["PYTHONPATH"]  # which accelerate adds for DeepSpeed
        free = {
            "CUDA_VISIBLE_DEVICES": not has_gpu(),
            "DS_ACCELERATOR": "deepspeed" not in sys.modules,
        }
        different = []
        for name in sorted({*environment, *self.at_start}):
            values = self.at_start.get(name), self.set_by_imports.get(name)
            if (
                environment.get(name) not in values
                and not name.startswith(OWN)
                and not free.get(name)
            ):
                different.append(name)
        return different

    def fork(self, request, streams, connection):
        pid = os.fork()
        if pid == 0:
            self.close_in_child(connection)
            request.environment.update(self.set_by_imports)
            become(request, streams, self.program)
        job = Job(pid, os.pidfd_open(pid), connection)
        self.jobs[pid] = job
        self.selector.register(job.pidfd, selectors.EVENT_READ, lambda: self.report_end(job))
        self.selector.register(
            job.connection, selectors.EVENT_READ, lambda: self.kill_abandoned(job)
        )
        send(connection, pid=pid)

    def close_in_child(self, connection):
        """In a new process, close what is the server's."""
        self.selector.close()
        self.listener.close()
        connection.close()
        for job in self.jobs.values():
            job.connection.close()
            os.close(job.pidfd)
        if self.owner:
            os.close(self.owner)

    def report_end(self, job):
        """Tell a client how its process ended."""
        _, status = os.waitpid(job.pid, 0)
        send(job.connection, status=os.waitstatus_to_exitcode(status))
        self.selector.unregister(job.pidfd)
        with contextlib.suppress(KeyError):
            self.selector.unregister(job.connection)
        os.close(job.pidfd)
        job.connection.close()
        del self.jobs[job.pid]

    def kill_abandoned(self, job):
        """End a process whose client was killed."""
        self.selector.unregister(job.connection)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)


def send(connection, **content):
    with contextlib.suppress(OSError):  # the client is gone
        connection.sendall(json.dumps(content).encode() + b"\n")


def has_gpu():
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")


def listen(path):
    """Return a socket at which clients can wait from now on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def serve(folder, owner):
    """Import the libraries and serve at `folder`/socket; a second process serves at socket.deepspeed."""
    at_start = dict(os.environ)
    (folder / "pid").write_text(str(os.getpid()))
    listeners = listen(folder / "socket"), listen(folder / "socket.deepspeed")
    sys.path.pop(0)  # the folder of this file
    import_libraries(LATER, ROOT / "recipes")
    first = os.getpid()
    with_deepspeed = os.fork() == 0
    if with_deepspeed:
        import_libraries(LATER_WITH_DEEPSPEED)
    if number_of_threads() > 1:
        sys.exit("the imports have started a thread, so that forks would not be safe")
    gc.collect()
    gc.freeze()  # what is there stays: a collection would only copy pages
    listeners[not with_deepspeed].close()
    owner = first if with_deepspeed else owner
    Server(listeners[with_deepspeed], str(folder / "python"), at_start, owner).serve()


# ---- From outside ----


def default_folder():
    """Return the folder of a server that is started by hand, another one after each change of the libraries."""
    packages = [
        folder
        for folder in map(Path, sys.path)
        if folder.name == "site-packages" and folder.is_dir()
    ]
    changed = [path.stat().st_mtime_ns for path in (*packages, Path(__file__), CLIENT)]
    key = hashlib.sha256(
        repr((sys.executable, sys.version, str(ROOT), changed)).encode()
    ).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"warm-{os.getuid()}-{key}"


def is_served(folder):
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(folder / "socket"))
        except OSError:
            return False
    return True


def start(folder=None, owner=None):
    """Start the server in a folder, if none is there, and return the path of the program that stands in for python.

    It comes back at once: clients wait for the imports. owner: the id of a process with which the server ends; without
    one it ends after half an hour without a request. Raises OSError where warm starts cannot be had.
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
        path.unlink()  # of a server that was killed
    words = shlex.join([sys.executable, "-I", "-S", str(CLIENT), str(folder / "socket")])
    program.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    program.chmod(0o700)
    if not os.access(program, os.X_OK):
        raise OSError(f"no program can be started from {folder}")
    with open(folder / "log", "w") as log:
        subprocess.Popen(
            [sys.executable, __file__, "serve", str(folder), *([str(owner)] if owner else [])],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=os.environ | AT_IMPORT,
        )
    deadline = time.monotonic() + 10
    while not is_served(folder):
        if time.monotonic() > deadline:
            raise OSError(f"the server did not start: {(folder / 'log').read_text()[-300:]}")
        time.sleep(0.02)
    return program


def stop(folder=None):
    """End the server of a folder; what runs for its clients goes on."""
    folder = Path(folder or default_folder())
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), signal.SIGTERM)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["start", "stop", "serve"])
    parser.add_argument(
        "folder", nargs="?", type=Path, help="of the server (default: in the temporary folder)"
    )
    parser.add_argument(
        "owner", nargs="?", type=int, help="serve: a process with which the server ends"
    )
    args = parser.parse_args()
    if args.command == "serve":
        serve(args.folder, args.owner)
    elif args.command == "stop":
        stop(args.folder)
    else:
        try:
            print(start(args.folder))
        except OSError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
