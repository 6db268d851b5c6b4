# SPDX-License-Identifier: Apache-2.0
"""Run a recipe with planted faults: `python evidence/faults.py RECIPE ...`, instead of the recipe.

The variable FAULT is a JSON list of faults, each with fields of `Fault`. The recipe is not
modified: the function that `at` names is wrapped from outside. That is a function of the recipe
itself, one of COMPONENTS, or "module:function" with another one.

A fault happens at the `call`-th call (default 1), at the first call in optimizer step `step` (of
the whole run, so that a resumed run does not repeat it), or at each call with `row` in its batch.
It happens on `rank`, by default on all. `do`:

    SIGTERM, SIGKILL, SIGSTOP, ...   the rank sends this signal to itself before the call, or `to`
                                     what has started it, the "launcher"; it makes `file` before
    wait, with `file`, `seconds`     make the file and sleep, until it is removed at the latest
    nan, inf                         the call returns its result times this
    inf gradient                     its result has an infinite gradient
    crash at change, with `number`   SIGKILL before the n-th change of the file system that Python
                                     makes in this call; with `lasting` in it or later
    crash at byte, with `number`     SIGKILL in the middle of a write, when a file would grow beyond
                                     this size; with `file` as soon as one of this name is opened
    refuse at byte, with `number`    such a write fails, as on a full disk
    fill disk, with `file`, `number` a file takes all of its disk except for so many bytes
    record rows, with `file`         append step and rows of each training batch to file.RANK

A thread writes checkpoints, so a fault in one of its functions does not stop the main thread.
"""

import contextlib
import functools
import importlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
from inject import WRITES, at_each_change

COMPONENTS = {
    "summed_loss": "core.loss:LossInHead.__call__",
    "skip_if_not_finite": "core.run:Run.skip_if_not_finite",
    "save": "core.checkpoint:Checkpoints.begin",
    # With what the writing thread does. Called before the first step too, if saves are due then
    "whole save": "core.run:Run._save_if_new",
    "write_share": "core.checkpoint:write",
}


@dataclass(frozen=True)
class Fault:
    """What happens in which call; see the top of this file."""

    do: str
    at: str
    rank: int | None = None
    call: int = 1
    step: int | None = None
    row: int | None = None
    lasting: bool = False
    to: str = "itself"
    file: str | Path = ""
    seconds: float = 0
    number: int = 0


# ---- The recipe ----


def find_target(at: str, recipe: ModuleType) -> tuple[Any, str]:
    """Return the owner of a function, a module or a class, and its name there."""
    module, is_elsewhere, path = COMPONENTS.get(at, at).partition(":")
    if not is_elsewhere:
        return recipe, at
    *outer, name = path.split(".")
    return functools.reduce(getattr, outer, importlib.import_module(module)), name


def current_step(runs: list[Any]) -> int:
    """Return the number of the optimizer step that is under way; 0 before there is a run."""
    return runs[0].step + 1 if runs else 0


def rows_of(arguments: tuple) -> list[int]:
    """Return the row numbers of the batch among the arguments of a call."""
    batches = [one for one in arguments if isinstance(one, Mapping) and "row" in one]
    return batches[0]["row"]


# ---- What a fault does to process and files ----


def limit_files(size: int) -> None:
    """Let no file grow beyond `size` bytes.

    The kernel sends SIGXFSZ or, if that is ignored, refuses the write (EFBIG).
    """
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))


def limit_when_opened(name: str, size: int) -> None:
    """Do so as soon as a file of this name is opened to be written."""

    def on_event(event: str, arguments: tuple) -> None:
        if event == "open" and arguments[2] & WRITES and str(arguments[0]).endswith(name):
            limit_files(size)

    sys.addaudithook(on_event)


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


class PlantedFault:
    """A fault, and the calls so far of the function around which it is planted."""

    def __init__(self, fault: Fault, owner: Any, name: str, rank: int, runs: list[Any]) -> None:
        self.fault = fault
        self.rank = rank
        self.runs = runs
        self.original = getattr(owner, name)
        self.steps = []  # the step of each call so far
        self.changes_left = -1  # until a crash; none is due while it is negative
        if fault.do == "crash at byte":
            # Python ignores it. It may be changed in the main thread only, before there is a limit.
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        setattr(owner, name, functools.wraps(self.original)(self.wrapped()))

    def wrapped(self) -> Any:
        """Return the function with the fault."""

        def call(*arguments: Any, **options: Any) -> Any:
            # The losses of an evaluation are of no step, and a resumed run repeats them
            is_evaluation = self.fault.at == "summed_loss" and not torch.is_grad_enabled()
            if not is_evaluation:
                self.steps.append(current_step(self.runs))
            if is_evaluation or not self.happens(arguments):
                return self.original(*arguments, **options)
            self.disturb(arguments)
            result = self.original(*arguments, **options)
            if not self.fault.lasting:
                self.changes_left = -1
            if self.fault.do in ("nan", "inf"):
                return result * float(self.fault.do)
            if self.fault.do == "inf gradient" and result.requires_grad:
                result.register_hook(lambda gradient: gradient * float("inf"))
            return result

        return call

    def happens(self, arguments: tuple) -> bool:
        """Return whether the fault happens at this call."""
        if self.fault.do == "record rows":
            return True
        if self.fault.row is not None:
            return self.fault.row in rows_of(arguments)
        if self.fault.step is None:
            return len(self.steps) == self.fault.call
        step = self.steps[-1]
        return step == self.fault.step and self.steps.count(step) == 1

    def disturb(self, arguments: tuple) -> None:
        """Do what the fault does to the process or to files, before the call."""
        fault = self.fault
        if fault.do == "record rows":
            line = {"step": current_step(self.runs), "rows": rows_of(arguments)}
            with open(f"{fault.file}.{self.rank}", "a") as file:
                file.write(json.dumps(line) + "\n")
        elif fault.do == "crash at change":
            self.changes_left = fault.number
            at_each_change(self.count_change)
        elif fault.do.endswith("at byte") and fault.file:
            limit_when_opened(str(fault.file), fault.number)
        elif fault.do.endswith("at byte"):
            limit_files(fault.number)
        elif fault.do == "fill disk":
            fill_disk(fault.file, fault.number)
        elif fault.do == "wait":
            wait(fault.file, fault.seconds)
        elif fault.do.startswith("SIG"):
            if fault.file:
                Path(fault.file).touch()
            receivers = {"itself": os.getpid(), "launcher": os.getppid()}
            os.kill(receivers[fault.to], getattr(signal, fault.do))

    def count_change(self) -> None:
        """Count a change that is about to happen, and kill this process before the last one."""
        self.changes_left -= 1
        if self.changes_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run as `python RECIPE ...` would, with the faults of this rank planted."""
    recipe, *arguments = sys.argv[1:]
    sys.argv = [recipe, *arguments]
    sys.path[0] = str(Path(recipe).resolve().parent)  # instead of the folder of this file
    module = importlib.import_module(Path(recipe).stem)
    runs: list[Any] = []  # The run, from its start on
    train: Any = module.train

    def train_and_show(args: Any, run: Any) -> None:
        runs.append(run)
        train(args, run)

    setattr(module, "train", train_and_show)  # noqa: B010
    rank = int(os.environ.get("RANK", 0))
    for fields in json.loads(os.environ["FAULT"]):
        fault = Fault(**fields)
        if fault.rank in (None, rank):
            PlantedFault(fault, *find_target(fault.at, module), rank, runs)
    module.main()


if __name__ == "__main__":
    main()
