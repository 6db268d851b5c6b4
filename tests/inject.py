# SPDX-License-Identifier: Apache-2.0
"""Run a recipe with a fault planted in the libraries below it: `python inject.py RECIPE ...`.

No function of the product is named, so that a rewrite of it meets the same faults. The variable
FAULT_IN_LIBRARIES is a JSON object or a list of them, each with fields of `Fault`:

    at     step N          before the N-th call of the optimizer in this process
           forward N       before the model's N-th forward pass with gradients
           evaluation N    before its N-th forward pass without
           map N           before the N-th call of Dataset.map: rows are prepared
           load N          before the N-th call of from_pretrained of a model
           write N         before the N-th file of tensors is written, in the thread that does it
    do     SIGTERM, ...    this rank sends itself the signal
           nan gradient    the gradient of one weight is NaN from here on
           nan weight      a weight is NaN, before the optimizer steps
           limit files     no file can grow beyond "size" bytes, as on a full disk
           copy at changes copies a folder to another before each change of the file system
           run             run "command", a list of words, and print how it ended
           wait            until the model has run forward "size" times with gradients
    to     who receives a signal: "own" process, its "group" or its "parent", the launcher
    rank   on which rank; on all without it

FAULT_NOTES names a file to which each flush and rename is appended, one JSON list a line.
"""

import functools
import itertools
import json
import os
import resource
import runpy
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")
WRITES = os.O_WRONLY | os.O_RDWR


@dataclass
class Fault:
    """What happens, before which call."""

    at: str
    do: str
    rank: int | None = None
    to: str = "own"
    size: int = 0
    command: tuple = ()

    def is_due(self, kind, number):
        place, _, wanted = self.at.partition(" ")
        return place == kind and number == int(wanted)


class Injector:
    """The faults of this rank, and how often each place was passed."""

    def __init__(self, faults):
        self.faults = faults
        self.passed = {}
        self.depth = 0  # Models call others: a head calls its base

    def passes(self, kind, subject=None):
        """Count a call of a kind, and do what is due before it."""
        self.passed[kind] = self.passed.get(kind, 0) + 1
        for fault in self.faults:
            if fault.is_due(kind, self.passed[kind]):
                if fault.do == "wait":
                    self.wait_for_forward(fault.size)
                else:
                    do(fault, subject)

    def wait_for_forward(self, number):
        print(f"waits for forward pass {number}", flush=True)
        while self.passed["forward"] < number:
            time.sleep(0.05)

    def before(self, owner, name, kind):
        """Have a function of a library pass `kind` at each call."""
        original = getattr(owner, name)
        function = getattr(original, "__func__", original)

        @functools.wraps(function)
        def call(*arguments, **options):
            self.passes(kind)
            return function(*arguments, **options)

        setattr(owner, name, classmethod(call) if function is not original else call)

    def plant(self):
        import safetensors.torch
        from datasets import Dataset
        from torch.optim.optimizer import register_optimizer_step_pre_hook
        from transformers import PreTrainedModel

        def before_step(optimizer, arguments, options):
            self.passes("step", optimizer)

        def before_forward(module, arguments):
            if isinstance(module, PreTrainedModel):
                self.depth += 1
                if self.depth == 1:  # A head calls its base, which counts with it.
                    self.passes("forward" if torch.is_grad_enabled() else "evaluation", module)

        def after_forward(module, arguments, output):
            if isinstance(module, PreTrainedModel):
                self.depth -= 1

        register_optimizer_step_pre_hook(before_step)
        torch.nn.modules.module.register_module_forward_pre_hook(before_forward)
        torch.nn.modules.module.register_module_forward_hook(after_forward, always_call=True)
        self.before(Dataset, "map", "map")
        self.before(PreTrainedModel, "from_pretrained", "load")
        self.before(safetensors.torch, "save_file", "write")


def do(fault, subject):
    """Do what a fault does."""
    if fault.do.startswith("SIG"):
        receivers = {"own": os.getpid(), "group": -os.getpgrp(), "parent": os.getppid()}
        os.kill(receivers[fault.to], getattr(signal, fault.do))
    elif fault.do == "run":
        done = subprocess.run(fault.command, env=without_fault(), capture_output=True)
        print(f"ended with {done.returncode}", flush=True)
    elif fault.do == "nan gradient":
        weight = next(weight for weight in subject.parameters() if weight.requires_grad)
        weight.register_hook(lambda gradient: gradient * float("nan"))
    elif fault.do == "nan weight":
        with torch.no_grad():
            subject.param_groups[0]["params"][0].fill_(float("nan"))
    elif fault.do == "limit files":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (fault.size, resource.RLIM_INFINITY))
    elif fault.do == "copy at changes":
        copy_at_changes(*fault.command)
    else:
        raise ValueError(fault.do)


def without_fault():
    return {key: value for key, value in os.environ.items() if key != "FAULT_IN_LIBRARIES"}


def copy_at_changes(source, target):
    """Have each change leave behind what a crash before it would leave: a copy by hard links."""
    numbers = itertools.count()
    is_copying = []

    def copy():
        if not is_copying:
            is_copying.append(True)
            shutil.copytree(source, Path(target, str(next(numbers))), copy_function=os.link)
            is_copying.clear()

    at_each_change(copy)


def at_each_change(function):
    """Call a function before each change of the file system from here on, and each flush."""

    def on_event(event, arguments):
        if event in CHANGES or (event == "open" and arguments[2] & WRITES):
            function()

    fsync = os.fsync

    def flush(descriptor):
        function()
        fsync(descriptor)

    os.fsync = flush
    sys.addaudithook(on_event)


def note_flushes(path):
    """Append each flush and rename of this process to a file: what was flushed before what."""

    def note(*words):
        with open(path, "a") as file:
            file.write(json.dumps(words) + "\n")

    fsync = os.fsync

    def noted_fsync(file):
        number = file if isinstance(file, int) else file.fileno()
        note("flush", os.readlink(f"/proc/self/fd/{number}"))
        fsync(file)

    def noted(rename):
        def call(source, target, **options):
            source, target = os.path.abspath(source), os.path.abspath(target)
            inside = sorted(os.listdir(source)) if os.path.isdir(source) else []
            note("rename", source, target, inside)
            rename(source, target, **options)

        return call

    os.fsync, os.rename, os.replace = noted_fsync, noted(os.rename), noted(os.replace)


def main():
    """Run the recipe as `python RECIPE ...` would."""
    recipe = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(recipe).resolve().parent)
    faults = json.loads(os.environ.get("FAULT_IN_LIBRARIES", "[]"))
    faults = faults if isinstance(faults, list) else [faults]
    rank = int(os.environ.get("RANK", 0))
    own = [Fault(**fields) for fields in faults if fields.get("rank", rank) == rank]
    if "FAULT_NOTES" in os.environ:
        note_flushes(os.environ["FAULT_NOTES"])
    if own:
        Injector(own).plant()
    runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
