# SPDX-License-Identifier: Apache-2.0
"""The folder in which trials run, and how the recipe is started in it."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from exits import Exit
from paths import RECIPES, ROOT
from proof.faults import Fault
from proof.jobs import Run
from proof.launch import ENVIRONMENT, data_of, make_model, rehearsal
from proof.trials.processes import kill_all

TIMEOUT = 300  # seconds for a launch: a run that hangs is not as promised
MOST_LAUNCHES = 9  # times that the same command is started in a row


@dataclass(frozen=True)
class Ended:
    """How a launch ended."""

    code: int | None  # None: it did not end in time
    output: str
    seconds: float

    @property
    def tail(self) -> str:
        """The end of what it printed, for the note of a trial that fails."""
        return self.output[-1500:]


class Launch:
    """A started run. Its output is collected in the background."""

    def __init__(self, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.folder = folder
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            errors="replace",
        )
        self.lines = []
        self.reader = threading.Thread(
            target=self.lines.extend, args=(self.process.stdout,), daemon=True
        )
        self.reader.start()

    def is_running(self) -> bool:
        """Return whether the launched process has not ended."""
        return self.process.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Wait for the end, at most this long; return whether it has ended."""
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def wait_for_file(self, path: Path) -> None:
        """Wait until the run has made a file, or has ended."""
        while not path.exists() and self.is_running():
            time.sleep(0.1)

    def end(self) -> Ended:
        """Wait for the end, kill any remaining processes, and return how it ended."""
        code = None
        if self.ends_within(TIMEOUT):
            code = self.process.returncode
        return self.kill(code)

    def kill(self, code: int | None = None) -> Ended:
        """Kill all processes of this run at once (kill -9)."""
        kill_all(self.folder)
        self.process.wait()
        self.reader.join()
        return Ended(code, "".join(self.lines), time.monotonic() - self.started)


class Lab:
    """A folder for models, rows and runs, and how runs are started in it."""

    def __init__(self, folder: Path, tiny: Path | None = None) -> None:
        """Make the folder.

        Args:
            tiny: the folder with model and rows of all jobs; by default each has its own.
        """
        self.folder = folder.resolve()
        self._tiny = tiny
        (self.folder / "tmp").mkdir(parents=True, exist_ok=True)

    def tiny_of(self, job: Run) -> Path:
        """Return the folder with a job's tiny model and rows, which are made once."""
        if self._tiny is not None:
            return self._tiny
        folder = self.folder / job.tiny
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                make_model(folder, job.maker)
        return folder

    def start(
        self,
        job: Run,
        folder: Path,
        faults: Sequence[Fault] = (),
        flags: Sequence = (),
        before: Sequence = (),
        environment: Mapping[str, str] | None = None,
    ) -> Launch:
        """Start the recipe into a folder.

        Args:
            faults: planted in the recipe (`proof.faults`).
            flags: further flags of the recipe, which override those of the job.
            before: words that precede the command.
            environment: variables that differ from this process's.
        """
        command = [*before, *self.command(job), *job.arguments]
        command += [*data_of(self.tiny_of(job)), *flags, "--output_dir", folder]
        planted = [dataclasses.asdict(fault) for fault in faults]
        variables = os.environ | ENVIRONMENT
        variables["TMPDIR"] = str(self.folder / "tmp")
        variables["TRIAL"] = str(folder)
        variables["FAULT"] = json.dumps(planted, default=str)
        variables |= environment or {}
        return Launch([str(word) for word in command], variables, folder)

    def command(self, job: Run) -> list:
        """Return the command that starts a recipe with faults, on CPU ranks or in one process."""
        command = [sys.executable]
        if job.config != "single":
            command = rehearsal(job.config, job.ranks)
        return [*command, ROOT / "evidence" / "proof" / "faults.py", RECIPES / f"{job.recipe}.py"]

    def run(self, job: Run, folder: Path, faults: Sequence[Fault] = (), **options: Any) -> Ended:
        """Run the recipe to its end; the options are those of `start`."""
        return self.start(job, folder, faults, **options).end()

    def run_until_done(
        self, job: Run, folder: Path, faults: Sequence[Fault] = (), flags: Sequence = ()
    ) -> list[Ended]:
        """Run the same command until it does not end as stopped; return all ends."""
        ends = [self.run(job, folder, faults, flags=flags)]
        while ends[-1].code == Exit.STOPPED and len(ends) < MOST_LAUNCHES:
            ends.append(self.run(job, folder, faults, flags=flags))
        return ends

    def uninterrupted(self, job: Run, faults: Sequence[Fault] = (), flags: Sequence = ()) -> Path:
        """Return the folder of a job that was not interrupted; it is run once.

        Raises:
            RuntimeError: if it does not end with 0.
        """
        name = "-".join([job.name, *(str(flag) for flag in flags)])
        folder = self.folder / "whole" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not is_newer_than_recipes(folder / "seconds"):
                shutil.rmtree(folder, ignore_errors=True)
                ended = self.run(job, folder, faults, flags=flags)
                if ended.code != 0:
                    raise RuntimeError(
                        f"{job.name} without a fault ended with {ended.code}: {ended.tail}"
                    )
                (folder / "seconds").write_text(f"{ended.seconds}")
        return folder


def is_newer_than_recipes(path: Path) -> bool:
    """Return whether a file exists and was written after the last change of a recipe."""
    changed = max(recipe.stat().st_mtime for recipe in RECIPES.rglob("*.py"))
    return path.exists() and path.stat().st_mtime >= changed
