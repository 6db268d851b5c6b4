#!/usr/bin/env python
"""Draw the loss and the learning rate of one or more runs from RUN_DIR/metrics.jsonl.

    python scripts/plot_loss.py runs/tiny/run
    python scripts/plot_loss.py runs/ddp runs/fsdp --output compare.png

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from exits import Exit, stop
from usage import Parser

NAMES = ("loss", "eval_loss", "learning_rate")

Metrics = list[dict[str, Any]]  # lines of metrics.jsonl


# ---- Reading ----


def read_metrics(run_dir: str) -> Metrics:
    """Return the lines of RUN_DIR/metrics.jsonl; exit with 65 if none has a step and a loss."""
    path = Path(run_dir) / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        stop(Exit.DATA, f"cannot read {path}: {reason}; give the --output_dir of a run")
    metrics = []
    for number, line in enumerate(lines, 1):
        try:
            metrics.append(parse_line(line))
        except ValueError as problem:
            stop(Exit.DATA, f"{path}, line {number}: {problem}")
    if not any("loss" in entry for entry in metrics):
        stop(Exit.DATA, f"{path}: no line with a loss")
    return metrics


def parse_line(line: str) -> dict[str, Any]:
    """Return one line of metrics.jsonl. Raises ValueError that says what is wrong with it."""
    try:
        entry = json.loads(line)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or "step" not in entry:
        raise ValueError("not a JSON object with a step")
    values = [entry["step"], *(entry.get(name) or 0.0 for name in NAMES)]
    if not all(isinstance(value, int | float) for value in values):
        raise ValueError(f"step, {', '.join(NAMES)} must be numbers")
    return entry


# ---- Drawing ----


def draw(runs: dict[str, Metrics]) -> Figure:
    """Return the picture of all runs: the loss above, the learning rate below."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    figure = Figure(figsize=(8, 5.5), layout=layout)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    for number, (run_dir, metrics) in enumerate(runs.items()):
        color = f"C{number % 10}"
        draw_losses(loss_axes, run_dir, metrics, color)
        rate_axes.plot(*column(metrics, "learning_rate"), color=color, linewidth=1.4)
    loss_axes.set_ylabel("loss (nats)")
    loss_axes.legend(frameon=False)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_xlabel("optimizer step")
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (loss_axes, rate_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_losses(axes: Axes, name: str, metrics: Metrics, color: str) -> None:
    """Draw a run's training loss, as it is and smoothed, and its evaluations."""
    steps, losses = column(metrics, "loss")
    axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    label = f"{name}: train, smoothed"
    axes.plot(steps, smooth(losses), color=color, linewidth=1.8, label=label)
    steps, losses = column(metrics, "eval_loss")
    if steps:
        style = {"color": color, "markeredgecolor": "black", "zorder": 3}
        axes.plot(steps, losses, "o", label=f"{name}: eval", **style)


def column(metrics: Metrics, name: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of the entries that have `name`."""
    entries = [entry for entry in metrics if entry.get(name) is not None]
    return [entry["step"] for entry in entries], [entry[name] for entry in entries]


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags."""
    averages = []
    for i in range(len(values)):
        half = min(len(values) // 40, i, len(values) - 1 - i)
        averages.append(sum(values[i - half : i + half + 1]) / (2 * half + 1))
    return averages


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run")
    parser.add_argument("--output", default="loss.png", help="picture to write; .png, .pdf or .svg")
    return parser.parse_args()


def main() -> None:
    """Draw the runs that the command line names."""
    args = parse_args()
    runs = {run_dir: read_metrics(run_dir) for run_dir in args.run_dirs}
    figure = draw(runs)
    try:
        figure.savefig(args.output, dpi=150)
    except (OSError, ValueError) as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {args.output}: {error}")
    print(args.output)


if __name__ == "__main__":
    main()
