# SPDX-License-Identifier: Apache-2.0
"""Contests of the benchmark on a GPU: contestants one after another, within the time of a cell."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from bench import commands, machine, measure, prepare, runs
from bench.cells import Cell, Contestant, Flags, Settings
from bench.figures import NAMES
from bench.gpu_cells import COMMON
from bench.models import MODELS
from bench.operations import flops_per_token, peak_of
from bench.smoke import in_small

from . import launches
from .cell import Row, Setup
from .launches import NO_TIME

WARMUP = 3  # steps
STEPS = 10  # timed ones
# Seconds that a run takes at least; with the 8B model it reads weights for most of that time
RUN_TIME = 10
RUN_TIME_8B = 45

Found = dict[str, Any]  # what was measured of a contestant, or {"failed": why}


@dataclass(frozen=True)
class Contest:
    """One comparison: a model, rows and flags that all contestants share."""

    name: str
    model: str  # name in bench/models.py
    flags: Flags
    contestants: dict[str, Contestant]  # by label
    rows: str = "long"

    def cell(self, setup: Setup) -> Cell:
        """Return it as a cell of the benchmark; with --tiny a tiny one of two contestants."""
        contestants = self.contestants
        if setup.tiny:
            contestants = dict(list(contestants.items())[:2])
        flags = COMMON | self.flags
        cell = Cell(self.name, "growth", self.model, self.rows, contestants, flags, STEPS)
        cell = replace(cell, device=setup.device)
        return in_small(cell) if setup.tiny else cell

    def job(self, setup: Setup) -> tuple[Flags, int]:
        """Return the recipe's flags in this contest, and the tokens of a batch that need logits."""
        cell = self.cell(setup)
        flags = cell.flags_of(cell.contestants["ours"])
        folder = settings_of(setup).model_folder(self.model) / "model"
        files = {"model_name_or_path": folder, "dataset_name": "rows.jsonl", "eval_strategy": "no"}
        rows = flags["per_device_train_batch_size"]
        return flags | files, rows * (flags["max_length"] - 1)

    def run(self, setup: Setup) -> Iterator[tuple[str, Found]]:
        """Run the contestants; yield the label of each, and what was measured.

        A contestant for which no time is left, or whose package is missing, yields the reason.
        Weights are deleted after each run.
        """
        settings = settings_of(setup)
        cell, left_out = measure.without_missing(self.cell(setup))
        for label, reason in left_out.items():
            yield label, {"failed": f"left out: {reason}"}
        prepare.make_models([self.model], settings)
        is_large = self.model == "8B" and not setup.tiny
        seconds_needed = RUN_TIME_8B if is_large else RUN_TIME
        for label, contestant in cell.contestants.items():
            if setup.seconds_left() < seconds_needed:
                yield label, {"failed": NO_TIME}
                continue
            data = prepare.prepare(cell, contestant, settings)
            found = runs.run_once(cell, label, data, settings)
            runs.delete_weights(settings.run_folder(cell, label))
            folder = setup.models / "RUN"
            command = commands.command_of(cell, contestant, data, folder, settings)
            yield label, found | {"command": launches.printable(command, setup)}

    def row_of(self, label: str, found: Found, device: str) -> Row:
        """Return one line: speed, memory in GiB, and the share of the GPU's peak if it is known.

        device: the name of the GPU.
        """
        name = NAMES.get(label, label)
        if "failed" in found:
            return {"what": name, "result": found["failed"]}
        row = {
            "what": name,
            "result": "trained, beside another process" if found["loaded"] else "trained",
            "tokens/s": round(found.get("tokens_per_second", 0)),
            "ms per step": round(found.get("seconds_per_step", 0) * 1e3, 1),
        }
        for kind in ("allocated", "reserved"):
            if kind in found["memory_mib"]:
                row[f"{kind}, GiB"] = round(found["memory_mib"][kind] / 1024, 2)
        peak = peak_of(device)
        if peak and "tokens_per_second" in found:
            row["MFU"] = round(self.flops(label) * found["tokens_per_second"] / peak, 3)
        return row

    def flops(self, label: str) -> int:
        """Return the operations that a contestant needs per token."""
        flags = COMMON | self.flags
        if label in self.contestants:
            flags = flags | self.contestants[label].flags
        lora = flags.get("use_peft", False)
        return flops_per_token(MODELS[self.model], flags["max_length"], lora)


def settings_of(setup: Setup) -> Settings:
    """Return the settings of the benchmark, without a data folder, so that rows are generated."""
    return Settings(setup.models, setup.models / "no data", smoke=setup.tiny, warmup=WARMUP)


def device_name(setup: Setup) -> str:
    """Return the name of the GPU or the processor."""
    return machine.facts(setup.device)["device"]


def times_the_step(found: Found, reference: Found) -> float | None:
    """Return the step time of a run relative to another's, None where one of them has none."""
    if "seconds_per_step" not in found or "seconds_per_step" not in reference:
        return None
    return round(found["seconds_per_step"] / reference["seconds_per_step"], 3)
