#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Draw a run, or compare several, from RUN_DIR/metrics.jsonl.

    python scripts/plot_loss.py runs/tiny/run
    python scripts/plot_loss.py runs/ddp runs/fsdp --output runs/compare.png
    python scripts/plot_loss.py runs/tiny/run --panels loss grad_norm

The picture of one run has its loss, its reward if it has one, and its learning rate. That of
several runs also has what they recorded of these: the metrics of their evaluations, tokens per
second, and peak memory. A table of the same is printed: the final loss is a mean over the last
twentieth of the steps, the speed that of the last call.

The picture is written to loss.png in the folder of the run, or to comparison.png in that of the
first run, unless --output names a file.

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common import Exit, Parser, run_command, stop

Line = dict[str, Any]  # one of metrics.jsonl: its step, and numbers or None by their names
Curve = tuple[list[float], list[float]]  # steps, and a value for each
LOSS = "loss"
SPEEDS = ("tokens_per_second", "images_per_second")
MEMORY = "peak_memory_gib"
SMALLER_IS_BETTER = ("loss", "perplexity", "mse")
PARTS = 20  # a smoothed value is a mean over one such part of a run
OF_ONE_RUN = ("loss", "reward", "learning_rate")
# eval_loss is in the panel of the loss, of which the perplexity is another form
NOT_A_PANEL = ("eval_loss", "eval_perplexity")


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run")
    add("--output", help="picture to write; .png, .pdf or .svg [loss.png or comparison.png]")
    add("--panels", nargs="+", metavar="METRIC", help="metrics of metrics.jsonl to draw [as above]")
    return parser.parse_args()


# ---- What runs have written ----
@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells it.

    Attributes:
        folder: as the command line names it.
        lines: of metrics.jsonl; at least one has a loss.
        loss_unit: as run.json has it; None without one.
    """

    folder: str
    lines: list[Line]
    loss_unit: str | None = None

    def curve(self, name: str) -> Curve:
        """Return the values of a metric by step; empty where the run has not recorded it."""
        found = [line for line in self.lines if line.get(name) is not None]
        return [line["step"] for line in found], [line[name] for line in found]


def read_run(folder: str) -> RecordedRun:
    """Return the run in a folder; exit with 65 if no line of its metrics has a loss."""
    path = Path(folder, "metrics.jsonl")
    record = Path(folder, "run.json")
    unit = None
    try:
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        if record.is_file():
            unit = json.loads(record.read_text(encoding="utf-8")).get("loss_unit")
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"{path}: {error}; give the --output_dir of a run")
    run = RecordedRun(folder, lines, unit)
    if not run.curve(LOSS)[0]:
        stop(Exit.DATA, f"{path}: no line with a loss")
    return run


def eval_metrics(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the metrics of all evaluations, in the order of their lines."""
    names = dict.fromkeys(name for run in runs for line in run.lines for name in line)
    return [name for name in names if name.startswith("eval_")]


# ---- The table ----
def cells_of(run: RecordedRun) -> dict[str, str]:
    """Return the numbers of a run by the names of their columns.

    Which of two evaluations is better follows from the metric's name, as with
    --load_best_model_at_end.
    """
    steps, losses = run.curve(LOSS)
    part = max(1, len(losses) // PARTS)  # one step is a matter of luck
    cells = {"steps": str(steps[-1]), "final loss": f"{fmean(losses[-part:]):.4g}"}
    for name in SPEEDS:
        _, speeds = run.curve(name)
        if speeds:
            cells[name] = f"{speeds[-1]:,.1f}"
    _, memory = run.curve(MEMORY)
    if memory:
        cells[MEMORY] = f"{max(memory):.4g}"
    for name in eval_metrics([run]):
        steps, values = run.curve(name)
        if values:
            best = min(values) if name.endswith(SMALLER_IS_BETTER) else max(values)
            cells[f"best {name}"] = f"{best:.4g} at {steps[values.index(best)]}"
    return cells


def table(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the lines of the table: one for each run, with - for what it has not recorded."""
    rows = [{"run": run.folder} | cells_of(run) for run in runs]
    columns = dict.fromkeys(name for row in rows for name in row)
    lines = [[*columns]]
    for row in rows:
        lines.append([row.get(column, "-") for column in columns])
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, cells, widths)).rstrip() for cells in lines]


# ---- The picture ----
def wanted_panels(names: Sequence[str] | None, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics to draw that a run has."""
    if names is None:
        names = OF_ONE_RUN
        if len(runs) > 1:
            evaluated = [name for name in eval_metrics(runs) if name not in NOT_A_PANEL]
            names = [*OF_ONE_RUN, *evaluated, *SPEEDS, MEMORY]
    return [name for name in names if any(run.curve(name)[0] for run in runs)]


def smooth(values: Sequence[float]) -> np.ndarray:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags.

    At both ends only the inner half of the window exists.
    """
    window = np.ones(2 * (len(values) // (2 * PARTS)) + 1)
    counts = np.convolve(np.ones(len(values)), window, "same")
    return np.convolve(values, window, "same") / counts


def draw(runs: Sequence[RecordedRun], panels: Sequence[str]) -> Figure:
    """Return the picture of all runs.

    Args:
        panels: names of metrics in metrics.jsonl.
    """
    figure = Figure(figsize=(8, 1 + 2.4 * len(panels)), layout="constrained")  # inches
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        draw_panel(axes, panel, runs)
    grid[-1, 0].set_xlabel("optimizer step")
    if len(runs) > 1:
        figure.legend(
            *grid[0, 0].get_legend_handles_labels(), loc="outside lower left", frameon=False
        )
    return figure


def draw_panel(axes: Axes, panel: str, runs: Sequence[RecordedRun]) -> None:
    """Draw the curve of each run; of losses also the evaluations, and the steps as they are."""
    label = panel.replace("_", " ")
    units = {run.loss_unit for run in runs}
    if panel == LOSS and len(units) == 1 and None not in units:
        label += f" ({units.pop()})"
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    for number, run in enumerate(runs):
        color = f"C{number}"
        steps, values = run.curve(panel)
        if panel == LOSS:
            axes.plot(steps, values, color=color, alpha=0.25)
            axes.plot(*run.curve("eval_loss"), "o", color=color)
            values = smooth(values)
        axes.plot(steps, values, color=color, label=run.folder)


def main() -> None:
    args = parse_args()
    runs = [read_run(folder) for folder in args.run_dirs]
    panels = wanted_panels(args.panels, runs)
    if not panels:
        stop(Exit.DATA, f"no panel {' '.join(args.panels)}: no run has it in its metrics.jsonl")
    name = "loss.png" if len(runs) == 1 else "comparison.png"
    output = args.output or Path(runs[0].folder, name)
    try:
        draw(runs, panels).savefig(output, dpi=150)
    except (OSError, ValueError) as error:  # An unknown ending is a ValueError
        stop(Exit.CANNOT_WRITE, f"cannot write {output}: {error}")
    if len(runs) > 1:
        print("\n".join(table(runs)))
        print()
    print(output)


if __name__ == "__main__":
    run_command(main)
