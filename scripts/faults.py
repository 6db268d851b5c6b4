"""Run a recipe with planted faults: what scripts/fault_injection.py and the tests put in the recipe's place.

    FAULT='{"do": "SIGTERM", "at": "summed_loss", "step": 5, "rank": 1}' python scripts/faults.py recipes/llama.py ...

FAULT is one fault or a list of them. The recipe stays untouched: the function of it, or of fault_tolerance.py, that
`at` names is wrapped from outside. A fault happens at the `call`-th call (default 1), at the first call in optimizer
step `step` (of the whole run, so that a resumed one meets it once), or at each call with `row` in its batch; on `rank`
or, if it names none, on all. `do`:

    SIGTERM, SIGKILL, SIGSTOP, ...   the rank sends this signal to itself before the call, with `group` to its whole
                                     group of processes, as torchrun, a terminal and some schedulers do
    wait, with `file`, `seconds`     make the file and sleep
    nan, inf                         the call returns this times its result
    inf gradient                     its result has an infinite gradient
    crash at change, with `change`   SIGKILL before the n-th change of the file system that Python makes in this call
    crash at byte, with `byte`       SIGKILL in the middle of a write, when a file would grow beyond this
    refuse at byte, with `byte`      such a write fails, as on a full disk
    fill disk, with `file`, `free`   a file takes what is free on its disk but for so many bytes
    record rows, with `file`         append step and rows of each training batch to file.RANK

With `after` what is done to files begins behind the call instead of before it.
"""

import contextlib
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path

import torch

RANK = int(os.environ.get("RANK", 0))
FAULTS = json.loads(os.environ.get("FAULT", "[]"))
FAULTS = [FAULTS] if isinstance(FAULTS, dict) else FAULTS
counting = []  # one entry while the changes of a call are counted
CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "os.link", "os.symlink")


def load(recipe):
    """The recipe as a module; its `main` has not run."""
    spec = importlib.util.spec_from_file_location("recipe", recipe)
    module = importlib.util.module_from_spec(spec)
    sys.modules["recipe"] = module
    spec.loader.exec_module(module)
    return module


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def crash_at_change(number):
    """Die before the `number`-th change of the call: audit events, and what raises none (fsync, the state's file)."""
    seen = []
    counting.append(number)

    def change():
        seen.extend(counting)
        if counting and len(seen) == number:
            die()

    def hook(event, arguments):
        if event in CHANGES or event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
            change()

    def counted(function):
        def call(*arguments, **options):
            change()
            result = function(*arguments, **options)
            change()
            return result

        return call

    os.fsync = counted(os.fsync)
    sys.modules["fault_tolerance"].save_file = counted(sys.modules["fault_tolerance"].save_file)
    sys.addaudithook(hook)


def limit_files(number, crash):
    """No file may grow beyond `number` bytes: the kernel sends SIGXFSZ, which kills, or refuses the write (EFBIG)."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if crash else signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (number, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    )


def fill_disk(path, free):
    """Leave `free` bytes on the disk of `path`."""
    with open(path, "wb") as file:
        os.posix_fallocate(
            file.fileno(), 0, max(shutil.disk_usage(Path(path).parent).free - free, 1)
        )


def record_rows(module, path, model, batch):
    if torch.is_grad_enabled():  # DeepSpeed's engine is always in training mode, its module is not
        with open(f"{path}.{RANK}", "a") as file:
            file.write(
                json.dumps({"step": module.fault_tolerance.RUN["step"], "rows": batch["row"]})
                + "\n"
            )


def disturb(do, fault, module, arguments):
    """Do to process and files what the fault says."""
    if do == "record rows":
        record_rows(module, fault["file"], *arguments)
    elif do == "crash at change":
        crash_at_change(fault["change"])
    elif do.endswith("at byte"):
        limit_files(fault["byte"], do.startswith("crash"))
    elif do == "fill disk":
        fill_disk(fault["file"], fault["free"])
    elif do == "wait":
        with contextlib.suppress(
            FileExistsError
        ):  # of several processes the first to come here waits
            Path(fault["file"]).touch(exist_ok=False)
            time.sleep(fault["seconds"])
    elif do.startswith("SIG"):
        (os.killpg if fault.get("group") else os.kill)(os.getpid(), getattr(signal, do))


def act(fault, module, original, arguments, options):
    """Do what the fault says around one call."""
    do = fault["do"]
    if not fault.get("after"):
        disturb(do, fault, module, arguments)
    result = original(*arguments, **options)
    counting.clear()
    if fault.get("after"):
        disturb(do, fault, module, arguments)
    if do in ("nan", "inf"):
        return result * float(do)
    if do == "inf gradient" and result.requires_grad:
        result.register_hook(lambda gradient: gradient * float("inf"))
    return result


def met(fault, module, calls, arguments):
    """Whether a fault happens at this call. calls: the step of each call so far, this one included."""
    if fault["do"] == "record rows":
        return True
    if "row" in fault:
        return fault["row"] in arguments[1]["row"]
    if (
        "step" in fault
    ):  # in training: an evaluation that a stop cut short is done again when the run goes on
        training = fault["at"] != "summed_loss" or torch.is_grad_enabled()
        return training and calls[-1] == fault["step"] and calls.count(calls[-1]) == 1
    return len(calls) == fault.get("call", 1)


def plant(module, fault):
    """Wrap the function of the fault."""
    owner = module if hasattr(module, fault["at"]) else module.fault_tolerance
    original, calls = getattr(owner, fault["at"]), []

    def wrapped(*arguments, **options):
        calls.append(module.fault_tolerance and module.fault_tolerance.RUN["step"])
        if met(fault, module, calls, arguments):
            return act(fault, module, original, arguments, options)
        return original(*arguments, **options)

    setattr(owner, fault["at"], wrapped)


def main():
    recipe = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(recipe).resolve().parent)
    module = load(recipe)
    for fault in FAULTS:
        if fault.get("rank", RANK) == RANK:
            plant(module, fault)
    module.main()


if __name__ == "__main__":
    main()
