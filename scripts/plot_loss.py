#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Draw the loss and the learning rate of one or more runs from RUN_DIR/metrics.jsonl.

    python scripts/plot_loss.py runs/tiny/run
    python scripts/plot_loss.py runs/ddp runs/fsdp --output runs/compare.png

The picture is written to loss.png in the folder of the (first) run unless --output names a file.

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FormatStrFormatter

from exits import Exit, stop
from usage import Parser

NAMES = ("loss", "eval_loss", "learning_rate")
LOG_SCALE_FROM = 5  # the largest loss over the smallest
PARTS = 20  # a value of the title or of the smoothed curve is a mean over one such part of a run

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
    figure.suptitle(title_of(runs), x=0.02, ha="left", weight="bold")
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    names = short_names(list(runs))
    for number, (run_dir, metrics) in enumerate(runs.items()):
        color = f"C{number % 10}"
        draw_losses(loss_axes, names[run_dir], metrics, color)
        rate_axes.plot(*column(metrics, "learning_rate"), color=color, linewidth=1.4)
    loss_axes.set_ylabel("loss (nats per token)")
    if needs_log_scale(runs):
        loss_axes.set_yscale("log")
        loss_axes.set_ylabel("loss (nats per token), log scale")
        loss_axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    loss_axes.legend(frameon=False)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_xlabel("optimizer step")
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    for axes in (loss_axes, rate_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def title_of(runs: dict[str, Metrics]) -> str:
    """Return the point of the picture: how far the loss of a run fell, or how many runs there are.

    One step is a matter of luck, so the title compares means over the first and the last twentieth
    of the steps.
    """
    if len(runs) > 1:
        return f"Loss of {len(runs)} runs"
    (metrics,) = runs.values()
    steps, losses = column(metrics, "loss")
    length = max(1, len(losses) // PARTS)
    first = mean(losses[:length])
    last = mean(losses[-length:])
    direction = "fell" if last < first else "did not fall:"
    return f"The loss {direction} from {first:.3g} to {last:.3g} in {steps[-1]} steps"


def short_names(run_dirs: Sequence[str]) -> dict[str, str]:
    """Return {run_dir: the part of its path in which it differs from the others}; "" for one."""
    if len(run_dirs) == 1:
        return {run_dirs[0]: ""}
    paths = [list(Path(run_dir).parts) for run_dir in run_dirs]
    for end in (0, -1):
        while all(len(parts) > 1 and parts[end] == paths[0][end] for parts in paths):
            for parts in paths:
                del parts[end]
    return {run_dir: "/".join(parts) for run_dir, parts in zip(run_dirs, paths, strict=True)}


def needs_log_scale(runs: dict[str, Metrics]) -> bool:
    """Whether a linear axis would show the end of a run as a flat line, and a log axis can be."""
    losses = []
    for metrics in runs.values():
        losses += column(metrics, "loss")[1] + column(metrics, "eval_loss")[1]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return bool(finite) and 0 < LOG_SCALE_FROM * min(finite) < max(finite)


def draw_losses(axes: Axes, name: str, metrics: Metrics, color: str) -> None:
    """Draw a run's training loss, as it is and smoothed, and its evaluations."""
    prefix = f"{name}: " if name else ""
    steps, losses = column(metrics, "loss")
    axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    label = f"{prefix}training, smoothed"
    axes.plot(steps, smooth(losses), color=color, linewidth=1.8, label=label)
    steps, losses = column(metrics, "eval_loss")
    if steps:
        style = {"color": color, "markeredgecolor": "black", "zorder": 3}
        axes.plot(steps, losses, "o", label=f"{prefix}evaluation", **style)


def column(metrics: Metrics, name: str) -> tuple[list[float], list[float]]:
    """Return the steps and values of the entries that have `name`."""
    entries = [entry for entry in metrics if entry.get(name) is not None]
    return [entry["step"] for entry in entries], [entry[name] for entry in entries]


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags.

    At both ends only the inner half of the window exists. It is not narrowed further, since the
    curve would then begin and end with the luck of a single step.
    """
    half = len(values) // (2 * PARTS)
    averages = []
    for i in range(len(values)):
        averages.append(mean(values[max(0, i - half) : i + half + 1]))
    return averages


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value; not finite if one of them is not."""
    return sum(values) / len(values)


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run")
    parser.add_argument(
        "--output", help="picture to write; .png, .pdf or .svg (default: RUN_DIR/loss.png)"
    )
    args = parser.parse_args()
    if args.output is None:
        args.output = str(Path(args.run_dirs[0]) / "loss.png")
    return args


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
