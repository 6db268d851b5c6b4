# SPDX-License-Identifier: Apache-2.0
"""The status of a run: status.json, errors that end it, and the message that a launcher repeats.

    OUTPUT_DIR/status.json    starting, running, done, stopped or failed, and why; `later_call` is
                              how a later call on a finished run ended

This module imports nothing slow, so that a wrong flag is reported at once.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil

from core.exits import Exit

RANK = int(os.environ.get("RANK", 0))
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", RANK))
HOST = os.uname().nodename
TIME_FORMAT = "%Y-%m-%d %H:%M:%S"  # In this format times sort as text.
# The other ranks of a host find the same problem, and the first one is to report it.
SECONDS_FOR_FIRST_RANK = 10


@dataclass(frozen=True)
class Ending:
    """How a rank ends, in all places that are to know it.

    Attributes:
        state: done, stopped or failed.
        exit_code: of its process.
        why: the reason, for status.json.
        text: what is printed; it may have several lines.
        rank: the rank that ends so.
        has_place: whether the text says on which host, and in which step.
    """

    state: str
    exit_code: int
    why: str | None = None
    text: str = ""
    rank: int = RANK
    has_place: bool = False

    @classmethod
    def done(cls) -> "Ending":
        """Return the end of a run of which nothing is left to do."""
        return cls("done", Exit.DONE)

    @classmethod
    def stopped(cls, why: str) -> "Ending":
        """Return the end of a run that the same command continues."""
        return cls("stopped", Exit.STOPPED, why, why)

    @classmethod
    def failed(cls, code: int, why: str, text: str = "", has_place: bool = False) -> "Ending":
        """Return the end of a run that failed; the text is by default the reason as an error."""
        return cls("failed", int(code), why, text or f"error: {why}", has_place=has_place)

    @classmethod
    def of_json(cls, text: str | bytes) -> "Ending":
        """Return what `to_json` was called on."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return a text for the ranks of other hosts."""
        return json.dumps(dataclasses.asdict(self))

    def with_place(self, when: str) -> "Ending":
        """Return the same with rank and host in the text, for the ranks of other hosts."""
        reason = self.text.removeprefix("error: ")
        text = f"error: rank {self.rank} on {HOST} ended {when}: {reason}"
        return dataclasses.replace(self, text=text, has_place=True)


# A context that tells others of an ending while what is done in it is done
Telling = Callable[[Ending], contextlib.AbstractContextManager[Any]]


class Status:
    """The state of this process's run, and the file in the output folder that records it.

    Attributes:
        state: starting, running, done, stopped or failed.
        step: the current step.
        output_dir: the folder of status.json; None if nothing is to be written.
        is_open: whether `output_dir` has been decided on.
        is_decided: whether it is settled how the run ends, though it has not ended yet.
        began: when this process began, in TIME_FORMAT.
    """

    def __init__(self) -> None:
        self.state = "starting"
        self.step = 0
        self.output_dir: Path | None = None
        self.is_open = False
        self.is_decided = False
        self.began = ""
        self._telling: Telling = contextlib.nullcontext

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

        The status of an earlier run is replaced, but not that of one that still runs in the folder.
        A dry run leaves no trace.
        """
        given = re.findall("--output[_-]dir[=\0]([^\0]+)", "\0".join(sys.argv))
        if not given or "--dry_run" in sys.argv or "--dry-run" in sys.argv:
            return
        self.output_dir = Path(given[-1])  # argparse takes the last one too.
        if is_still_running(self.read()):
            self.output_dir = None
        elif RANK == 0:
            self._forget_later_call()
            self.set("starting")

    def set(self, state: str) -> None:
        """Record in status.json that the run is starting or running."""
        was_training = self.state != "starting"
        self.state = state
        self._record(state, None, None, was_training)

    def end(self, ending: Ending) -> None:
        """Record in status.json how the run ended. Of several failures the first counts.

        A finished run stays done until it trains again. If a later call fails before that, because
        of wrong arguments for example, this is recorded beside it as `later_call`.
        """
        was_training = self.state != "starting"
        self.state = ending.state
        if not (self.is_decided and ending.state == "failed"):
            self._record(ending.state, ending.exit_code, ending.why, was_training)

    def decide(self, ending: Ending) -> None:
        """Record how the run ends, though its ranks still watch each other.

        Every rank calls it, and rank 0 writes. A rank that is lost from now on changes nothing of
        it, since nothing is left to train or to save.
        """
        if RANK == 0:
            was_training = self.state != "starting"
            self._record(ending.state, ending.exit_code, ending.why, was_training)
        self.is_decided = True

    def tell_other_hosts_by(self, telling: Telling) -> None:
        """Have `announce` tell the ranks of other hosts by this context from now on."""
        self._telling = telling

    def announce(self, ending: Ending) -> None:
        """Record how this rank ends, and tell the launcher and the ranks of other hosts."""
        with self._telling(ending):
            self.end(ending)
            report_to_launcher(ending)

    def _record(self, state: str, code: int | None, why: str | None, was_training: bool) -> None:
        """Write status.json as `end` says."""
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
        """Return the content of status.json, {} if it cannot be read."""
        if self.output_dir is None:
            return {}
        with contextlib.suppress(OSError, ValueError):
            status = json.loads((self.output_dir / "status.json").read_text())
            if isinstance(status, dict):
                return status
        return {}

    def reported_by_others(self) -> Ending | None:
        """Return how another process of this run ended, as it reported, or None.

        On this host `report_to_launcher` has written it, for each rank in a folder beside this
        rank's, whether or not the output folder exists. Other hosts, and processes without
        torchrun, only have status.json.
        """
        path = os.environ.get("TORCHELASTIC_ERROR_FILE")
        errors = sorted(Path(path).parent.parent.glob("*/error.json")) if path else []
        for file in errors:
            with contextlib.suppress(OSError, ValueError):
                report = json.loads(file.read_text())
                if "state" in report:  # torch writes such files too, without a state.
                    return ending_of(report)
        report = last_call(self.read())
        # The file may still be that of an earlier run, until rank 0 replaces it.
        is_of_this_run = report.get("time", "") >= self.began
        if is_of_this_run and report.get("state") in ("failed", "stopped"):
            return ending_of(report)
        return None

    def _write(self, facts: Mapping[str, Any]) -> None:
        """Write status.json if that is possible."""
        assert self.output_dir is not None
        path = self.output_dir / "status.json"
        text = json.dumps(facts, indent=2)
        # On a full disk there is usually room in place of the old text. If not, exit code and
        # message still say how the run ended.
        writers: list[Callable[[Path, str], Any]] = [write_file, Path.write_text]
        for write in writers:
            try:
                write(path, text)
                return
            except OSError:
                continue

    def _forget_later_call(self) -> None:
        """Remove `later_call`, which an earlier call has left, from the status of a done run."""
        status = self.read()
        if "later_call" in status:
            del status["later_call"]
            self._write(status)


@functools.cache
def process_status() -> Status:
    """Return the status of this process: there is one, as there is one exit code.

    It is looked up and not passed along, since a run can end where it could not be passed: in
    `fail`, which readers of arguments, files and rows call before there is a Run, and in functions
    whose signatures Python dictates, such as signal handlers. The first call makes it.
    """
    return Status()


def last_call(status: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a status that is about the last call."""
    return status.get("later_call", status)


def ending_of(report: Mapping[str, Any]) -> Ending:
    """Return how a process ended that has left this in status.json or in its launcher's file."""
    why = report.get("why")
    return Ending(report["state"], report.get("exit_code") or Exit.FAILED, why, why or "")


def is_still_running(status: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote a status.json on this host is still running."""
    is_active = status.get("state") in ("starting", "running") and status.get("host") == HOST
    return is_active and status["process"] != os.getpid() and psutil.pid_exists(status["process"])


def fail(code: int, *problems: str) -> NoReturn:
    """Print the problems, record them in status.json, and end this process with `code`.

    The launcher then ends the other ranks.
    """
    if LOCAL_RANK > 0:
        time.sleep(SECONDS_FOR_FIRST_RANK)
    text = "\n".join(f"error: {problem}" for problem in problems)
    print(text, file=sys.stderr, flush=True)
    status = process_status()
    if not status.is_open:
        status.open_for_wrong_call()
    status.announce(Ending.failed(code, problems[0], text))
    sys.exit(code)


def report_to_launcher(ending: Ending, later: int = 0) -> None:
    """Write how this process ends to the file from which torchrun reads it.

    accelerate's launcher is torchrun too. Its report then ends with that text, and the other
    processes of this host read there what happened. The first text of a process counts. The format
    is that of torch's ErrorHandler (torch/distributed/elastic/multiprocessing/errors); the launcher
    prints its `py_callstack`.

    Args:
        later: seconds to add to the time, since the report ends with the text of the earliest.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    extra = {"py_callstack": ending.text, "timestamp": str(int(time.time()) + later)}
    report = {
        "message": {"message": ending.text, "extraInfo": extra},
        "state": ending.state,
        "exit_code": ending.exit_code,
        "why": ending.why,
    }
    with contextlib.suppress(OSError):
        write_file(path, json.dumps(report))


def write_file(path: str | Path, text: str) -> None:
    """Replace a file as a whole, so that no reader ever sees a part of it; flush it to the disk."""
    staged = f"{path}.{RANK}.tmp"
    with open(staged, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(staged, path)
