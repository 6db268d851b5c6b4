# SPDX-License-Identifier: Apache-2.0
"""Run a recipe with planted faults: a program that tests and trials run instead of the recipe.

    FAULT='{"do": "SIGTERM", "at": "summed_loss", "step": 5, "rank": 1}' \\
        python evidence/proof/faults.py recipes/llama.py ...

FAULT is one fault or a list of them, each with fields of `Fault`. The recipe is not modified: the
function that `at` names is wrapped from outside. `at` is a path "module:function" or
"module:Class.method", where the recipe's own module is called "recipe". A plain name is a function
of the recipe, or one of SHORT_NAMES. If a module imports a function by name, `at` must name it in
that module, since that is what the module calls.

A fault happens at the `call`-th call (default 1), at the first call in optimizer step `step` (of
the whole run, so that a resumed run does not repeat it), or at each call with `row` in its batch.
It happens on `rank`, by default on all. `do`:

    SIGTERM, SIGKILL, SIGSTOP, ...   the rank sends this signal to itself before the call; with
                                     `group` to its whole process group, as torchrun, a terminal and
                                     some schedulers do; with `launcher` to what has started it
    wait, with `file`, `seconds`     make the file and sleep, until it is removed at the latest
    nan, inf                         the call returns its result times this
    inf gradient                     its result has an infinite gradient
    crash at change, with `change`   SIGKILL before the n-th change of the file system that Python
                                     makes in this call; with `lasting` in it or later
    crash at byte, with `byte`       SIGKILL in the middle of a write, when a file would grow beyond
                                     this size
    refuse at byte, with `byte`      such a write fails, as on a full disk
    fill disk, with `file`, `free`   a file takes all of its disk except for `free` bytes
    record rows, with `file`         append step and rows of each training batch to file.RANK

With `after`, a fault of files begins after the call instead of before it. A thread writes
checkpoints, so a fault in one of its functions does not stop the main thread.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR  # flags with which a file is opened for writing
# Functions of components in which trials plant faults
SHORT_NAMES = {
    "summed_loss": "components.head_loss:LossInHead.__call__",
    "between_steps": "components.run:Run._between_steps",
    "skip_if_not_finite": "components.run:Run.skip_if_not_finite",
    "gather_state": "components.run:gather_state",
    "save": "components.run:Run._save",
    "save_file": "components.checkpoint:save_file",
    "hash_of": "components.checkpoint:hash_of",
    "write_share": "components.saving:write_share",
}
LOSSES = ("__call__", "summed_loss")  # evaluation calls them too


@dataclass(frozen=True)
class Fault:
    """What happens in which call; see the top of this file."""

    do: str
    at: str
    rank: int | None = None
    call: int = 1
    step: int | None = None
    row: int | None = None
    after: bool = False
    lasting: bool = False
    group: bool = False
    launcher: bool = False
    file: str | Path = ""
    seconds: float = 0
    change: int = 0
    byte: int = 0
    free: int = 0


@dataclass(frozen=True)
class Target:
    """A function as an attribute of its module or class."""

    owner: Any
    name: str


# ---- The recipe ----


def load(recipe: str) -> ModuleType:
    """Return the recipe as the module "recipe"; its `main` has not run."""
    spec = importlib.util.spec_from_file_location("recipe", recipe)
    if spec is None or spec.loader is None:
        raise ImportError(f"{recipe} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    return module


def find_target(at: str, recipe: ModuleType) -> Target:
    """Return the function of a fault: "module:function", "module:Class.method" or a plain name."""
    if not hasattr(recipe, at):
        at = SHORT_NAMES.get(at, at)
    module_name, colon, path = at.rpartition(":")
    if colon:
        *outer, name = path.split(".")
        owner = functools.reduce(getattr, outer, importlib.import_module(module_name))
        return Target(owner, name)
    return Target(recipe, at)


def current_step() -> int:
    """Return the optimizer step of the run; 0 for a recipe without components."""
    status = sys.modules.get("components.status")
    return status.process_status().step if status else 0


def rows_of(arguments: tuple) -> list[int]:
    """Return the row numbers of the batch among the arguments of a call."""
    for argument in arguments:
        if isinstance(argument, Mapping) and "row" in argument:
            return argument["row"]
    raise ValueError("a fault with rows must be planted in a function that takes a batch")


# ---- What a fault does to process and files ----


class CrashAtChange:
    """Kills this process before the n-th change of the file system, as long as it is active.

    Changes are those that raise audit events, and two that do not: flushes, and the write of the
    state file. The latter two count twice, before and after the call.
    """

    def __init__(self, number: int) -> None:
        self.changes_left = number
        self.is_active = True
        os.fsync = self.counted(os.fsync)
        saver: Any = sys.modules.get("components.checkpoint")
        if saver is not None:
            saver.save_file = self.counted(saver.save_file)
        sys.addaudithook(self.on_event)

    def count(self) -> None:
        """Count a change that is about to happen, and kill this process before the last one."""
        if not self.is_active:
            return
        self.changes_left -= 1
        if self.changes_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_event(self, event: str, arguments: tuple) -> None:
        """Count an audit event that is a change."""
        if event in CHANGES or (event == "open" and arguments[2] & WRITES):
            self.count()

    def counted(self, function: Callable) -> Callable:
        """Return the function, with a change counted before and after each call."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            self.count()
            result = function(*arguments, **options)
            self.count()
            return result

        return call


def limit_files(size: int) -> None:
    """Let no file grow beyond `size` bytes.

    The kernel sends SIGXFSZ or, if that is ignored, refuses the write (EFBIG).
    """
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


def fill_disk(path: str | Path, free: int) -> None:
    """Leave `free` bytes on the disk of `path`."""
    size = shutil.disk_usage(Path(path).parent).free - free
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def wait(path: str | Path, seconds: float) -> None:
    """Make the file and sleep, until it is removed at the latest.

    Of several processes only the first one to call this does.
    """
    with contextlib.suppress(FileExistsError):
        Path(path).touch(exist_ok=False)
        until = time.monotonic() + seconds
        while time.monotonic() < until and Path(path).exists():
            time.sleep(0.05)


def send_signal(fault: Fault) -> None:
    """Send the signal of a fault to this process, to its process group, or to its launcher."""
    number = getattr(signal, fault.do)
    if fault.group:
        os.killpg(os.getpid(), number)
    elif fault.launcher:
        os.kill(os.getppid(), number)
    else:
        os.kill(os.getpid(), number)


# ---- One fault around one function ----


class PlantedFault:
    """A fault, and the calls so far of the function around which it is planted."""

    def __init__(self, fault: Fault, target: Target, rank: int) -> None:
        self.fault = fault
        self.target = target
        self.rank = rank
        self.original = getattr(target.owner, target.name)
        self.steps = []  # the step of each call so far
        self.crash = None

    def plant(self) -> None:
        """Replace the original function by one with the fault."""
        if self.fault.do == "crash at byte":
            # Python ignores it. It may be changed in the main thread only, before there is a limit.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            self.steps.append(current_step())
            if self.happens(arguments):
                return self.call(arguments, options)
            return self.original(*arguments, **options)

        setattr(self.target.owner, self.target.name, wrapped)

    def happens(self, arguments: tuple) -> bool:
        """Return whether the fault happens at this call."""
        if self.fault.do == "record rows":
            return True
        if self.fault.row is not None:
            return self.fault.row in rows_of(arguments)
        if self.fault.step is None:
            return len(self.steps) == self.fault.call
        if self.target.name in LOSSES and not torch.is_grad_enabled():
            # A resumed run repeats an evaluation that was interrupted, and must not be hit again.
            return False
        step = self.steps[-1]
        return step == self.fault.step and self.steps.count(step) == 1

    def call(self, arguments: tuple, options: dict) -> Any:
        """Call the function with the fault around it."""
        if not self.fault.after:
            self.disturb(arguments)
        result = self.original(*arguments, **options)
        if self.crash and not self.fault.lasting:
            self.crash.is_active = False
        if self.fault.after:
            self.disturb(arguments)
        if self.fault.do in ("nan", "inf"):
            return result * float(self.fault.do)
        if self.fault.do == "inf gradient" and result.requires_grad:
            result.register_hook(lambda gradient: gradient * float("inf"))
        return result

    def disturb(self, arguments: tuple) -> None:
        """Do what the fault does to the process or to files."""
        fault = self.fault
        if fault.do == "record rows":
            self.record_rows(arguments)
        elif fault.do == "crash at change":
            self.crash = CrashAtChange(fault.change)
        elif fault.do in ("crash at byte", "refuse at byte"):
            limit_files(fault.byte)
        elif fault.do == "fill disk":
            fill_disk(fault.file, fault.free)
        elif fault.do == "wait":
            wait(fault.file, fault.seconds)
        elif fault.do.startswith("SIG"):
            send_signal(fault)

    def record_rows(self, arguments: tuple) -> None:
        """Append the step and the rows of a training batch to the rank's file."""
        # The model's mode does not say: DeepSpeed's engine is always in training mode.
        if torch.is_grad_enabled():
            line = {"step": current_step(), "rows": rows_of(arguments)}
            with open(f"{self.fault.file}.{self.rank}", "a") as file:
                file.write(json.dumps(line) + "\n")


def faults_of_environment() -> list[Fault]:
    """Return the faults of the environment variable FAULT."""
    faults = json.loads(os.environ.get("FAULT", "[]"))
    if isinstance(faults, dict):
        faults = [faults]
    return [Fault(**fields) for fields in faults]


def main() -> None:
    """Run as `python RECIPE ...` would, with the faults of this rank planted."""
    recipe, *arguments = sys.argv[1:]
    sys.argv = [recipe, *arguments]
    sys.path[0] = str(Path(recipe).resolve().parent)  # instead of the folder of this file
    module = load(recipe)
    rank = int(os.environ.get("RANK", 0))
    for fault in faults_of_environment():
        if fault.rank is None or fault.rank == rank:
            PlantedFault(fault, find_target(fault.at, module), rank).plant()
    module.main(module.start(module.Arguments, module.__doc__))


if __name__ == "__main__":
    main()
