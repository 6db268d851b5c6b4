"""What becomes of a run: status.json, wrong calls, and the last words that a launcher prints.

    OUTPUT_DIR/status.json    starting, running, done, stopped or failed, and why;
                              what a call on a finished run met is its later_call

Nothing here takes long to import, so that a wrong flag is told at once.
"""

import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import psutil

RANK = int(os.environ.get("RANK", 0))
HOST = os.uname().nodename
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"  # texts in it sort as the times do
SECONDS_FOR_RANK_0 = 10  # the other ranks meet the same problem: rank 0 speaks first


class Status:
    """The state of this process's run, and the file in the output folder that says it.

    Attributes:
        state: starting, running, done, stopped or failed.
        step: the step in which the run is.
        output_dir: the folder of status.json; None where nothing is to be written.
        is_open: whether a folder, or none, has been chosen.
        began: when this process began, in TIME_FORMAT.
    """

    def __init__(self) -> None:
        self.state = "starting"
        self.step = 0
        self.output_dir: Path | None = None
        self.is_open = False
        self.began = ""

    @property
    def is_training(self) -> bool:
        """Whether the run has begun and not ended: then its ranks watch each other."""
        return self.state in ("starting", "running")

    def open(self, output_dir: Path | None) -> None:
        """Begin the status of a run in `output_dir`; None, as in a dry run, leaves no trace."""
        self.began = time.strftime(TIME_FORMAT)
        self.output_dir = output_dir
        self.is_open = True
        if RANK == 0 and output_dir is not None:
            self._forget_later_call()
            self.set("starting")

    def open_for_wrong_call(self) -> None:
        """Choose the folder in which a call that was refused while parsing is recorded.

        No status of the run before may stay. A dry run leaves no trace, and a run that is still
        going in that folder keeps its own status.
        """
        given = re.findall("--output_dir[=\0]([^\0]+)", "\0".join(sys.argv))
        if not given or "--dry_run" in sys.argv:
            return
        self.output_dir = Path(given[-1])  # of several argparse takes the last
        if is_still_running(self.read()):
            self.output_dir = None
        elif RANK == 0:
            self._forget_later_call()
            self.set("starting")

    def set(self, state: str, code: int | None = None, why: str | None = None) -> None:
        """Say in status.json what became of the run. Of several failures the first counts.

        A finished run stays done until it trains again. What a later call met before that, such
        as wrong arguments, is recorded beside it as `later_call`.
        """
        was_training = self.state != "starting"
        self.state = state
        if self.output_dir is None:
            return
        before = self.read()
        if state == "failed" and last_call(before).get("state") == "failed":
            return
        facts = {
            "state": state,
            "exit_code": code,
            "why": why,
            "step": self.step,
            "rank": RANK,
            "host": HOST,
            "process": os.getpid(),
            "time": time.strftime(TIME_FORMAT),
        }
        if before.get("state") == "done" and not was_training:
            if state == "starting":
                return
            if state in ("failed", "stopped"):
                facts = before | {"later_call": facts}
        self._write(facts)

    def read(self) -> dict[str, Any]:
        """Return what status.json says, {} if there is none that can be read."""
        if self.output_dir is None:
            return {}
        with contextlib.suppress(OSError, ValueError):
            status = json.loads((self.output_dir / "status.json").read_text())
            if isinstance(status, dict):
                return status
        return {}

    def told_by_others(self) -> Mapping[str, Any]:
        """Return what another process of this run has told of its end, or {}.

        It has state, exit_code and why. On this host `tell_launcher` has written it, for each
        rank in a folder beside ours, whether or not the output folder exists. Of other hosts, and
        without torchrun, only status.json tells.
        """
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        errors = sorted(Path(path).parent.parent.glob("*/error.json")) if path else []
        for file in errors:
            with contextlib.suppress(OSError, ValueError):
                told = json.loads(file.read_text())
                if "state" in told:  # torch writes such files too
                    return told
        told = last_call(self.read())
        is_of_this_run = told.get("time", "") >= self.began  # rank 0 may not have replaced it yet
        if is_of_this_run and told.get("state") in ("failed", "stopped"):
            return told
        return {}

    def _write(self, facts: Mapping[str, Any]) -> None:
        """Write status.json, as far as that is possible."""
        assert self.output_dir is not None
        path = self.output_dir / "status.json"
        text = json.dumps(facts, indent=2)
        # A full disk mostly has room in place of the old text; exit code and message tell anyway
        writers: list[Callable[[Path, str], Any]] = [write_file, Path.write_text]
        for write in writers:
            try:
                write(path, text)
                return
            except OSError:
                continue

    def _forget_later_call(self) -> None:
        """Take what an earlier call met out of the status of a run that is done."""
        status = self.read()
        if "later_call" in status:
            del status["later_call"]
            self._write(status)


@functools.cache
def process_status() -> Status:
    """Return the status of this process, of which there is one, as there is one exit code.

    Signal handlers, exception hooks and `fail` reach it here.
    """
    return Status()


def last_call(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a status that is about the last call."""
    return status.get("later_call", status)


def is_still_running(status: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a status.json on this host has not come to its end."""
    is_active = status.get("state") in ("starting", "running") and status.get("host") == HOST
    return is_active and status["process"] != os.getpid() and psutil.pid_exists(status["process"])


def fail(code: int, *problems: str) -> NoReturn:
    """Print the problems, record them in status.json, and end this process with `code`.

    The launcher then ends the other ranks.
    """
    if RANK > 0:
        time.sleep(SECONDS_FOR_RANK_0)
    text = "\n".join(f"error: {problem}" for problem in problems)
    print(text, file=sys.stderr, flush=True)
    status = process_status()
    if not status.is_open:
        status.open_for_wrong_call()
    status.set("failed", code, problems[0])
    tell_launcher("failed", code, problems[0], text)
    sys.exit(code)


def tell_launcher(state: str, code: int, why: str, text: str, later: int = 0) -> None:
    """Leave a text in the file from which torchrun reads why a process ended.

    accelerate's launcher is torchrun too. Its report then ends with that text, and the other
    processes of this host read there what happened. The first text of a process counts. The form
    of the file is that of torch's ErrorHandler (torch/distributed/elastic/multiprocessing/errors);
    the launcher prints its `py_callstack`.

    Args:
        state, code, why: as in status.json.
        later: seconds to add to the time, since the report ends with the text of the earliest.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()) + later)}
    told = {
        "message": {"message": text, "extraInfo": extra},
        "state": state,
        "exit_code": code,
        "why": why,
    }
    with contextlib.suppress(OSError):
        write_file(path, json.dumps(told))


def write_file(path: str | Path, text: str) -> None:
    """Replace a file as a whole, on the disk: at no instant is there a part of it."""
    staged = f"{path}.{RANK}.tmp"
    with open(staged, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
