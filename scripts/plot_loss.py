#!/usr/bin/env python
"""Draw the loss and the learning rate of one or more runs from RUN_DIR/metrics.jsonl.

    python scripts/plot_loss.py runs/tiny/run
    python scripts/plot_loss.py runs/ddp runs/fsdp --output compare.png

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

NAMES = ("loss", "eval_loss", "learning_rate")


def stop(code, message):
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(code)


def read_metrics(run_dir):
    """Return the lines of RUN_DIR/metrics.jsonl as dicts; stops if there is none with a step and a loss."""
    path = Path(run_dir) / "metrics.jsonl"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        stop(65, f"cannot read {path}: {reason}; give the --output_dir of a run")
    metrics = []
    for number, line in enumerate(lines, 1):
        try:
            metrics.append(json.loads(line))
            values = [metrics[-1]["step"], *(metrics[-1].get(name) or 0.0 for name in NAMES)]
        except (ValueError, AttributeError, KeyError, TypeError):
            stop(65, f"{path}, line {number}: not a JSON object with a step")
        if not all(isinstance(value, int | float) for value in values):
            stop(65, f"{path}, line {number}: step, {', '.join(NAMES)} must be numbers")
    if not any("loss" in entry for entry in metrics):
        stop(65, f"{path}: no line with a loss")
    return metrics


def column(metrics, name):
    """Return the steps and values of the entries that have `name`."""
    points = [(entry["step"], entry[name]) for entry in metrics if entry.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def smooth(values):
    """Return the means over about a twentieth of the run, centred so that the curve does not lag."""
    averages = []
    for i in range(len(values)):
        half = min(len(values) // 40, i, len(values) - 1 - i)
        averages.append(sum(values[i - half : i + half + 1]) / (2 * half + 1))
    return averages


def draw_run(name, metrics, color, loss_axes, rate_axes):
    steps, losses = column(metrics, "loss")
    loss_axes.plot(steps, losses, color=color, alpha=0.25, linewidth=0.8)
    loss_axes.plot(
        steps, smooth(losses), color=color, linewidth=1.8, label=f"{name}: train, smoothed"
    )
    steps, losses = column(metrics, "eval_loss")
    if steps:
        loss_axes.plot(
            steps,
            losses,
            "o",
            color=color,
            markeredgecolor="black",
            zorder=3,
            label=f"{name}: eval",
        )
    rate_axes.plot(*column(metrics, "learning_rate"), color=color, linewidth=1.4)


def parse_args():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.error = lambda message: stop(64, message)
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run")
    parser.add_argument("--output", default="loss.png", help="picture to write; .png, .pdf or .svg")
    return parser.parse_args()


def main():
    args = parse_args()
    runs = {run_dir: read_metrics(run_dir) for run_dir in args.run_dirs}

    figure, (loss_axes, rate_axes) = plt.subplots(
        2, 1, sharex=True, figsize=(8, 5.5), height_ratios=[4, 1], layout="constrained"
    )
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # inches
    for number, (run_dir, metrics) in enumerate(runs.items()):
        draw_run(run_dir, metrics, f"C{number % 10}", loss_axes, rate_axes)
    loss_axes.set_ylabel("loss (nats)")
    loss_axes.legend(frameon=False)
    rate_axes.set_ylabel("learning rate")
    rate_axes.set_xlabel("optimizer step")
    rate_axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (loss_axes, rate_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    try:
        figure.savefig(args.output, dpi=150)
    except (OSError, ValueError) as error:
        stop(73, f"cannot write {args.output}: {error}")
    print(args.output)


if __name__ == "__main__":
    main()
