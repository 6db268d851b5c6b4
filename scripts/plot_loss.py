#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Draw a run, or compare several, from RUN_DIR/metrics.jsonl.

    python scripts/plot_loss.py runs/tiny/run
    python scripts/plot_loss.py runs/ddp runs/fsdp --output runs/compare.png
    python scripts/plot_loss.py runs/tiny/run --panels loss grad_norm

The picture of one run has its loss, its reward if it has one, and its learning rate. That of
several runs also has what they recorded of these: the metrics of their evaluations, tokens per
second, and peak memory. A table of the same is printed, and in which arguments the runs differ: the
final loss is a mean over the last twentieth of the steps, the speed that of the last call.

The picture is written to loss.png in the folder of the run, or to comparison.png in that of the
first run, unless --output names a file.

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
import itertools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common import Exit, Parser, run_command, stop

Line = dict[str, Any]  # one of metrics.jsonl: its step, and numbers or None by their names
Curve = tuple[list[float], list[float]]  # steps, and a value for each
LOSS = "loss"
REWARD = "reward"
SPEEDS = ("tokens_per_second", "images_per_second")
MEMORY = "peak_memory_gib"
SMALLER_IS_BETTER = ("loss", "perplexity", "mse")
PARTS = 20  # a smoothed value is a mean over one such part of a run
NOT_COMPARED = {"output_dir", "run_name"}
RATE = "learning_rate"
EVALUATIONS = "eval"
# eval_loss is in the panel of the loss, of which the perplexity is another form
NOT_A_PANEL = ("eval_loss", "eval_perplexity")


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run")
    add("--output", help="picture to write; .png, .pdf or .svg [loss.png or comparison.png]")
    add(
        "--panels",
        nargs="+",
        metavar="PANEL",
        help="loss, eval (each metric of the evaluations), tokens_per_second, memory, "
        "learning_rate, or any metric of metrics.jsonl [for one run loss, reward and learning "
        "rate, for several all of these]",
    )
    add("--json", type=Path, metavar="FILE", help="also write the numbers of each run here")
    return parser.parse_args()


# ---- What runs have written ----
@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells it.

    Attributes:
        folder: as the command line names it.
        lines: of metrics.jsonl; at least one has a loss.
        facts: the content of run.json; {} if there is none.
    """

    folder: str
    lines: list[Line]
    facts: dict[str, Any]

    def curve(self, name: str) -> Curve:
        """Return the values of a metric by step; empty where the run has not recorded it."""
        found = [line for line in self.lines if line.get(name) is not None]
        return [line["step"] for line in found], [line[name] for line in found]

    def eval_metrics(self) -> list[str]:
        """Return the names of the metrics of all evaluations, in the order of their lines."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.lines))
        return [name for name in names if name.startswith("eval_")]

    def settings(self) -> dict[str, Any]:
        """Return strategy, precision and arguments by their names, as run.json has them."""
        found = self.facts.get("summary", {}) | self.facts.get("arguments", {})
        compared = ["strategy", "precision", *self.facts.get("arguments", {})]
        return {name: found[name] for name in compared if name in found}


def read_run(folder: str) -> RecordedRun:
    """Return the run in a folder; exit with 65 if no line of its metrics has a loss."""
    path = Path(folder, "metrics.jsonl")
    record = Path(folder, "run.json")
    facts = {}
    try:
        lines = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]
        if record.is_file():
            facts = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"{path}: {error}; give the --output_dir of a run")
    run = RecordedRun(folder, lines, facts)
    if not run.curve(LOSS)[0]:
        stop(Exit.DATA, f"{path}: no line with a loss")
    return run


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags.

    At both ends only the inner half of the window exists.
    """
    half = len(values) // (2 * PARTS)
    averages = []
    for place in range(len(values)):
        first = max(0, place - half)
        averages.append(fmean(values[first : place + half + 1]))
    return averages


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return for each run what its folder's path has beyond the folder that all are in."""
    folders = [os.path.abspath(run.folder) for run in runs]
    common = os.path.commonpath(folders)
    return [os.path.relpath(folder, common) for folder in folders]


def differences(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return for each run the settings in which the runs with a run.json differ."""
    settings = [run.settings() for run in runs]
    known = [found for found in settings if found]
    differing = set()
    for name in set(itertools.chain.from_iterable(known)) - NOT_COMPARED:
        values = {json.dumps(found.get(name)) for found in known}
        if len(values) > 1:
            differing.add(name)
    return [{name: found[name] for name in found if name in differing} for found in settings]


# ---- The numbers ----
def rows_of(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return the numbers of each run; None stands for what it has not recorded."""
    rows = []
    for run, differs in zip(runs, differences(runs), strict=True):
        steps, losses = run.curve(LOSS)
        row: dict[str, Any] = {"run": run.folder, "differs": differs, "steps": steps[-1]}
        part = max(1, len(losses) // PARTS)
        row["final_loss"] = fmean(losses[-part:])  # one step is a matter of luck
        row["best"] = {metric: best_of(run, metric) for metric in run.eval_metrics()}
        for name in SPEEDS:
            _, speeds = run.curve(name)
            row[name] = speeds[-1] if speeds else None
        row[MEMORY] = max(run.curve(MEMORY)[1], default=None)
        rows.append(row)
    return rows


def best_of(run: RecordedRun, metric: str) -> dict[str, float] | None:
    """Return the best value of a metric over all evaluations, and its step.

    Which of two is better follows from the metric's name, as with --load_best_model_at_end.
    """
    steps, values = run.curve(metric)
    if not values:
        return None
    best = max(values)
    if metric.endswith(SMALLER_IS_BETTER):
        best = min(values)
    return {"value": best, "step": steps[values.index(best)]}


def table(names: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of the table, and below it in what the runs differ."""
    columns = [["run", *names], ["steps", *(str(row["steps"]) for row in rows)]]
    for metric in dict.fromkeys(metric for row in rows for metric in row["best"]):
        cells = [f"best {metric}"]
        for row in rows:
            best = row["best"].get(metric)
            cells.append(f"{best['value']:.4g} at {best['step']}" if best else "-")
        columns.append(cells)
    for name in ("final_loss", *SPEEDS, MEMORY):
        cells = [row[name] for row in rows]
        if any(cell is not None for cell in cells):
            columns.append([name.replace("_", " "), *map(number_text, cells)])
    widths = [max(map(len, cells)) for cells in columns]
    lines = []
    for cells in zip(*columns, strict=True):
        name, *numbers = cells
        padded = [cell.rjust(width) for cell, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]))
    for name, row in zip(names, rows, strict=True):
        if row["differs"]:
            settings = [f"{key}={value}" for key, value in row["differs"].items()]
            lines.append(f"  {name}: {', '.join(settings)}")
    return lines


def number_text(value: float | None) -> str:
    """Return a number, or - where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


# ---- The picture ----
def wanted_panels(names: Sequence[str] | None, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics to draw that a run has; `eval` stands for those of the evaluations."""
    if names is None:
        names = [LOSS, REWARD, RATE]
        if len(runs) > 1:
            names = [LOSS, REWARD, EVALUATIONS, *SPEEDS, MEMORY, RATE]
    panels: dict[str, None] = {}
    for name in names:
        found = [MEMORY if name == "memory" else name]
        if name == EVALUATIONS:
            found = [metric for run in runs for metric in run.eval_metrics()]
            found = [metric for metric in found if metric not in NOT_A_PANEL]
        panels |= dict.fromkeys(found)
    return [panel for panel in panels if any(run.curve(panel)[0] for run in runs)]


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
        lines, _ = grid[0, 0].get_legend_handles_labels()
        figure.legend(lines, names_of(runs), loc="outside lower left", frameon=False)
    return figure


def draw_panel(axes: Axes, panel: str, runs: Sequence[RecordedRun]) -> None:
    """Draw the curve of each run; of losses also the evaluations, and the steps as they are."""
    label = panel.replace("_", " ")
    units = {run.facts.get("loss_unit") for run in runs}
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
    if panel in (*SPEEDS, MEMORY):
        axes.set_ylim(bottom=0)


def main() -> None:
    args = parse_args()
    runs = [read_run(folder) for folder in args.run_dirs]
    panels = wanted_panels(args.panels, runs)
    if not panels:
        stop(Exit.DATA, f"no panel {' '.join(args.panels)}: no run has it in its metrics.jsonl")
    name = "loss.png" if len(runs) == 1 else "comparison.png"
    output = args.output or Path(runs[0].folder, name)
    rows = rows_of(runs)
    try:
        draw(runs, panels).savefig(output, dpi=150)
        if args.json is not None:
            args.json.write_text(json.dumps({"runs": rows}, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:  # An unknown ending is a ValueError
        stop(Exit.CANNOT_WRITE, f"cannot write {output}: {error}")
    if len(runs) > 1:
        print("\n".join(table(names_of(runs), rows)))
        print()
    print(output)


if __name__ == "__main__":
    run_command(main)
