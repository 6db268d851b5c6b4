# SPDX-License-Identifier: Apache-2.0
"""The server of warm starts: `python server.py FOLDER OWNER`, until the process OWNER ends."""

import ast
import atexit
import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
import warnings
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
OWN = tuple(f"{REPO}/{room}/" for room in ("recipes", "scripts", "evidence", "tests"))
EXIT_AT_ONCE = os._exit  # the original, even if a script replaces it
# Modules that recipes and their libraries import while they run. A missing entry only costs time.
LATER = (
    "accelerate.commands.launch torch.distributed.run torch.distributed.launcher.api "
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous torch.nn.attention.varlen "
    "numpy.ctypeslib einops hjson msgpack pydantic encodings.idna bitsandbytes "
    "peft.tuners.lora.bnb peft.utils.transformers_weight_conversion "
    "transformers.integrations.bitsandbytes transformers.models.bert.modeling_bert "
    "transformers.models.llama.modeling_llama transformers.models.mistral.modeling_mistral "
    "transformers.models.mixtral.modeling_mixtral transformers.models.t5.modeling_t5 "
    "transformers.models.vit.modeling_vit "
    # accelerate imports it to save a model, whatever the engine
    "deepspeed deepspeed.module_inject.auto_ep_layer deepspeed.moe.ep_experts "
    "deepspeed.runtime.superoffload.superoffload_stage3 "
    "deepspeed.runtime.zero.muon.muon_optimizer torch._subclasses.schema_check_mode"
).split()
# Prefixes of variables that may differ between processes, since no library reads them when it is
# imported; the last ones are set by this project and its tests
FREE_VARIABLES = tuple(
    "_ COLUMNS LINES MAKE MFLAGS OLDPWD PATH PS1 PWD SHLVL TERM TMPDIR VIRTUAL_ENV ACCELERATE_ "
    "FSDP_ JE_ARROW_MALLOC_CONF MIXED_PRECISION PARALLELISM_ PYTORCH_NVML_BASED_CUDA_CHECK GLOO_ "
    "GROUP_ LOCAL_ MASTER_ NCCL_ RANK ROLE_ TORCHELASTIC_ TORCH_NCCL_ WORLD_SIZE "
    "TOKENIZERS_PARALLELISM FAULT GPU_PROOF_ NET_ PYTEST_ REHEARSAL_ TRIAL WARM_".split()
)


# ---- What is imported ----
def import_libraries():
    """Import what the recipes' files import at their top, except for files of this project."""
    own = {path.stem for room in ("recipes", "scripts") for path in (REPO / room).iterdir()}
    for path in sorted((REPO / "recipes").rglob("*.py")):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ImportFrom):
                names = [statement.module]
            elif isinstance(statement, ast.Import):
                names = [alias.name for alias in statement.names]
            else:
                continue
            if not own & {name.partition(".")[0] for name in names}:
                with contextlib.suppress(ImportError):
                    exec(ast.unparse(statement), {})


def import_modules(names):
    """Import modules by name, except those that are not installed."""
    for name in names:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


# ---- A process of a client ----
def become(request, streams, program):
    """Run as `python *arguments` would, and exit.

    Args:
        request: what it starts with, as python.py describes it.
        streams: the three file descriptors of its standard streams.
        program: its sys.executable, which makes its own children start warm too.
    """
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    # What it would share with all other forks
    sys.executable = program
    tempfile.tempdir = None
    random.seed()
    sys.modules["numpy"].random.seed()
    if "PYTHONPATH" in os.environ:
        sys.path[0:0] = os.environ["PYTHONPATH"].split(os.pathsep)
    words = request["arguments"]
    is_unbuffered = words[0] == "-u"
    for stream in (sys.stdout, sys.stderr):
        by_line = stream.isatty() or stream is sys.stderr
        stream.reconfigure(write_through=is_unbuffered, line_buffering=by_line)
    end(run(words[1:] if is_unbuffered else words))


def run(words):
    """Run a script, or a module after -m, as the interpreter does.

    Returns:
        The exit code; a negative one is a signal.
    """
    try:
        if words[0] == "-m":
            # runpy would warn about modules that are already imported.
            warnings.filterwarnings("ignore", module="runpy")
            sys.argv = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0


def end(code):
    """Exit as the interpreter does: join threads, call exit functions, flush streams.

    Modules are not torn down one by one, which takes time and has no visible effect.
    """
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
class Server:
    """Forks processes for clients and reports how they ended; it has one thread.

    Args:
        listener: the socket of the clients.
        program: sys.executable of the processes.
        at_start: the environment before the imports.
        owner: the id of a process whose end also ends this one.
    """

    def __init__(self, listener, program, at_start, owner):
        self.listener = listener
        self.program = program
        self.at_start = at_start
        changed = os.environ.items() - at_start.items()
        self.set_by_imports = dict(changed)  # variables that libraries set
        self.owner = os.pidfd_open(owner)
        self.selector = selectors.DefaultSelector()
        self.selector.register(listener, selectors.EVENT_READ, self.accept)
        self.selector.register(self.owner, selectors.EVENT_READ, sys.exit)
        self.jobs = {}  # {file descriptor of a process: connection of its client}

    def serve(self):
        """Answer requests until the owner ends."""
        while True:
            for key, _ in self.selector.select():
                key.data()

    def accept(self):
        """Fork a process for a new client, or answer why it must start cold."""
        connection, _ = self.listener.accept()
        streams = []
        try:
            _, streams, _, _ = socket.recv_fds(connection, 1, 3)
            request = json.loads(connection.makefile().readline())
        except (OSError, ValueError):
            connection.close()  # The client was killed meanwhile.
        else:
            reason = self.reason_for_cold(request)
            if reason:
                send(connection, cold=reason)
                connection.close()
            else:
                self.fork(request, streams, connection)
        for stream in streams:
            os.close(stream)

    def reason_for_cold(self, request):
        """Why a fork of this server would differ from what is requested, or None."""
        environment = dict(request["environment"])
        if environment.get("PYTHONPATH") == request["folder"]:
            del environment["PYTHONPATH"]  # accelerate adds it for DeepSpeed
        names = sorted({*environment, *self.at_start})
        different = [name for name in names if self.differs(name, environment.get(name))]
        if different:
            return f"the libraries were imported with another value of {', '.join(different)}"
        return None

    def differs(self, name, value):
        """Whether a variable with this value would have made a difference to the imports."""
        if value in (self.at_start.get(name), self.set_by_imports.get(name)):
            return False
        if name in ("CUDA_VISIBLE_DEVICES", "DS_ACCELERATOR"):
            return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/kfd")
        return not name.startswith(FREE_VARIABLES)

    def fork(self, request, streams, connection):
        """Start a process for a client."""
        pid = os.fork()
        if pid == 0:
            self.selector.close()
            self.listener.close()
            connection.close()
            for descriptor, other in self.jobs.items():
                other.close()
                os.close(descriptor)
            os.close(self.owner)
            request["environment"] |= self.set_by_imports
            become(request, streams, self.program)
        descriptor = os.pidfd_open(pid)
        self.jobs[descriptor] = connection

        def report_end():
            _, status = os.waitpid(pid, 0)
            send(connection, status=os.waitstatus_to_exitcode(status))
            self.selector.unregister(descriptor)
            with contextlib.suppress(KeyError):
                self.selector.unregister(connection)
            os.close(descriptor)
            connection.close()
            del self.jobs[descriptor]

        def kill_abandoned():
            self.selector.unregister(connection)  # Its client was killed.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

        self.selector.register(descriptor, selectors.EVENT_READ, report_end)
        self.selector.register(connection, selectors.EVENT_READ, kill_abandoned)
        send(connection, pid=pid)


def send(connection, **content):
    """Send a line of JSON, if the client is still connected."""
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(content).encode() + b"\n")


def listen(path):
    """Return a socket to which clients can connect from now on."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    return listener


def main():
    """Import the libraries and serve at FOLDER/socket."""
    folder, owner = Path(sys.argv[1]), int(sys.argv[2])
    at_start = dict(os.environ)
    listener = listen(folder / "socket")
    sys.path[:] = [place for place in sys.path if not f"{place}/".startswith(OWN)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_libraries()
        import_modules(LATER)
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("the imports have started a thread, which makes forks unsafe")
    gc.collect()
    gc.freeze()  # Collections in forks would only copy the pages of these objects.
    Server(listener, str(folder / "python"), at_start, owner).serve()


if __name__ == "__main__":
    main()
