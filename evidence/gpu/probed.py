# SPDX-License-Identifier: Apache-2.0
"""Runs of a recipe under the benchmark's probe."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench import prepare
from bench.cells import Cell, Contestant, Flags
from bench.commands import PROBE, as_words
from bench.gpu_cells import COMMON
from bench.smoke import in_small

from . import launches
from .cell import Setup
from .contests import settings_of
from .launches import NO_TIME

LEAST_SECONDS = 5  # that must be left to start a run
STEPS = 12  # steps for which rows are prepared


@dataclass(frozen=True)
class Probed:
    """One run to measure."""

    name: str
    flags: Flags
    script: str = "recipes/llama.py"
    steps: int = 5
    warmup: int = 2  # the first of these steps, which are not measured
    config: str = ""  # a YAML without its suffix, for accelerate's launcher; "": one plain process
    variables: dict[str, str] = field(default_factory=dict)  # environment variables

    def command(self, folder: Path) -> list[str]:
        """Return its command line, whose probe writes `folder`/probe.json."""
        command: list[Any] = [sys.executable]
        if self.config:
            command += ["-m", "accelerate.commands.launch"]
            command += ["--config_file", f"accelerate_configs/{self.config}.yaml"]
            command += ["--main_process_port", "0"]
        command += [PROBE, folder / "probe.json", "--warmup", self.warmup, "--steps", self.steps]
        common = {"max_steps": self.steps, "output_dir": folder / "run", "eval_strategy": "no"}
        command += [self.script, *as_words({"save_steps": 0} | self.flags | common)]
        return [str(word) for word in command]


@dataclass(frozen=True)
class Reading:
    """The measurements of a run under the probe."""

    command: str
    failed: str = ""  # why it did not train, "" if it did
    seconds_per_step: float | None = None  # after the warm-up
    peaks: Mapping[str, int] = field(default_factory=dict)  # bytes, by the probe's names

    @property
    def result(self) -> str:
        """Its result in a table."""
        return self.failed or "trained"


def run(setup: Setup, probed: Probed) -> Reading:
    """Run a recipe under the probe."""
    folder = setup.work / re.sub(r"\W+", "_", probed.name)
    folder.mkdir(parents=True, exist_ok=True)
    command = probed.command(folder)
    shown = launches.printable(command, setup)
    seconds = setup.seconds_left()
    if seconds < LEAST_SECONDS:
        return Reading(shown, NO_TIME)
    environment = launches.environment_of(setup, launched=bool(probed.config))
    done = launches.finish(command, environment | probed.variables, seconds)
    if done.code is not None:
        (folder / "output.txt").write_text(done.output)
    if done.failure:
        return Reading(shown, done.failure)
    probe = json.loads((folder / "probe.json").read_text())
    seconds_per_step = timed(probe["ends"], probed.warmup)
    return Reading(shown, seconds_per_step=seconds_per_step, peaks=probe["memory"])


def timed(ends: list[float], warmup: int) -> float | None:
    """Return the seconds per step after the warm-up, None if there are no such steps.

    ends: of all steps, in seconds.
    """
    steps = len(ends) - warmup
    if steps <= 0:
        return None
    return (ends[-1] - ends[warmup - 1]) / steps


@dataclass(frozen=True)
class Prepared:
    """A model and its rows."""

    flags: Flags  # flags of the job, which name both
    data: Path  # folder of the rows


def model_and_rows(setup: Setup, model: str, flags: Flags, rows: str = "long") -> Prepared:
    """Make a model of the benchmark and rows for it; return all flags of the job."""
    ours = {"ours": Contestant("ours")}
    cell = Cell("rows", "growth", model, rows, ours, COMMON | flags, STEPS, device=setup.device)
    if setup.tiny:
        cell = in_small(cell)
    settings = settings_of(setup)
    prepare.make_models([model], settings)
    data = prepare.prepare(cell, cell.contestants["ours"], settings)
    folder = settings.model_folder(model) / "model"
    named = {"model_name_or_path": folder, "dataset_name": data / "rows.jsonl"}
    return Prepared(cell.flags | named, data)
