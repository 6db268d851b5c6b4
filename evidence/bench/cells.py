# SPDX-License-Identifier: Apache-2.0
"""What a comparison is: a cell, its contestants, and the settings of all its runs."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Flags of a program by name, without the dashes; True means that the flag takes no value
Flags = dict[str, Any]
# What was measured in one run, in one cell with its runs, and all of results/benchmark.json
Run = dict[str, Any]
Result = dict[str, Any]
Results = dict[str, Any]


@dataclass(frozen=True)
class Contestant:
    """One side of a comparison."""

    tool: str  # "ours", or a name from evidence/benchmark_peers.py
    flags: Flags = field(default_factory=dict)  # flags in addition to those of the cell
    ranks: int = 1
    model: str = ""  # a model in place of the cell's; "": the cell's
    needs: str = ""  # package without which it is left out


@dataclass(frozen=True)
class Cell:
    """One comparison: a model, rows and a few contestants."""

    name: str
    kind: str  # "matched", "shipped", "start" or "growth"; evidence/benchmark.py explains them
    model: str  # name in bench/models.py
    rows: str  # "gsm8k", "words" (written with the model) or "long" (longer than --max_length)
    contestants: dict[str, Contestant]  # by label
    flags: Flags = field(default_factory=dict)  # flags that all contestants share
    steps: int = 20  # timed steps; 0: one pass over the rows
    num_rows: int = 0  # 0: as many as the steps need
    device: str = "cpu"
    # Tokenized rows are kept from run to run ("kept"), made in each run ("cold"), or made in a
    # first run that is not measured ("warm")
    cache: str = "kept"

    def flags_of(self, contestant: Contestant) -> Flags:
        """Return all flags of a contestant."""
        return self.flags | contestant.flags

    def model_of(self, contestant: Contestant) -> str:
        """Return the name of the model that a contestant trains."""
        return contestant.model or self.model

    def models(self) -> list[str]:
        """Return the names of the models of all contestants, sorted."""
        return sorted({self.model_of(contestant) for contestant in self.contestants.values()})


@dataclass(frozen=True)
class Settings:
    """The settings that all runs of all cells share."""

    output_dir: Path  # folder of models, rows and runs
    data: Path  # folder of GSM8K's rows
    smoke: bool = False  # tiny versions of all cells, without figures
    warmup: int = 5  # steps before the timed ones

    def model_folder(self, name: str) -> Path:
        """Return the folder of a model: model/ and data/."""
        return self.output_dir / "models" / slug(name)

    def run_folder(self, cell: Cell, label: str) -> Path:
        """Return the folder of a contestant's newest run."""
        return self.output_dir / "cells" / slug(cell.name) / slug(label)

    def warmup_of(self, cell: Cell) -> int:
        """Return the number of steps before the timed ones; a cell of one step times the first."""
        return 0 if cell.steps == 1 else self.warmup

    def steps_of(self, cell: Cell) -> int:
        """Return the number of steps of a run, including the warm-up; 0: one pass over the rows."""
        return cell.steps + self.warmup if cell.steps > 1 else cell.steps


def slug(name: str) -> str:
    """Return a name that is suitable for a file."""
    return re.sub(r"\W+", "_", name)
