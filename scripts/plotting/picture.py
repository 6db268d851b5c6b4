# SPDX-License-Identifier: Apache-2.0
"""The picture of one run, or of several beside each other: a panel for each thing they recorded."""

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

from plotting.runs import (
    LOSS,
    MEMORY,
    SPEEDS,
    RecordedRun,
    differences,
    first_and_last,
    names_of,
    setting_text,
    smooth,
)

# The colors of Okabe and Ito, which color-blind readers can tell apart
COLORS = ["#0072b2", "#e69f00", "#009e73", "#c2410c", "#a3578a"]
LOG_SCALE_FROM = 5  # the largest loss over the smallest
THINNEST = 1.6  # points; the width of the line of the last run
WIDER = 2.5  # points; how much wider the line of the first run is: equal runs are all seen
WIDTH = 8.0  # inches
MOST_SETTINGS = 3  # a legend with more of them is not read


# ---- Words ----
def labels_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return how a legend names each run: its folder, and in what it differs from the others."""
    labels = []
    for name, settings in zip(names_of(runs), differences(runs), strict=True):
        if 0 < len(settings) <= MOST_SETTINGS:
            parts = [setting_text(*setting) for setting in settings.items()]
            name = f"{name}: {', '.join(parts)}"
        labels.append(name)
    return labels


def title_of(runs: Sequence[RecordedRun]) -> str:
    """Return the point of the picture: how far the loss of a run fell, or how many runs there are.

    One step is a matter of luck, so the title compares means over the first and the last twentieth
    of the steps.
    """
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    steps, losses = runs[0].curve(LOSS)
    first, last = first_and_last(losses)
    direction = "did not fall:"
    if last < first:
        direction = "fell"
    return f"The loss {direction} from {first:.3g} to {last:.3g} in {steps[-1]} steps"


def panel_title(panel: str, runs: Sequence[RecordedRun]) -> str:
    """Return the title of the axis of a panel; that of the loss with its unit, if all have one."""
    if panel == MEMORY:
        return "peak memory of\nrank 0 (GiB)"
    units = {run.facts.get("loss_unit") for run in runs}
    if panel == LOSS and len(units) == 1 and None not in units:
        return f"loss ({units.pop()})"
    title = panel.replace("_", " ")
    if panel.startswith("eval_"):
        return f"{title.removeprefix('eval ')}\n(evaluation)"
    return title


# ---- Drawing ----
def look_of(number: int, num_runs: int) -> dict[str, Any]:
    """Return matplotlib's options of the line of a run; from the sixth on it is dashed."""
    later = (num_runs - 1 - number) / num_runs
    return {
        "color": COLORS[number % len(COLORS)],
        "linestyle": "-" if number < len(COLORS) else (0, (4, 1.5)),
        "linewidth": THINNEST + later * WIDER,
    }


def draw(runs: Sequence[RecordedRun], panels: Sequence[str]) -> Figure:
    """Return the picture of all runs.

    Args:
        panels: names of metrics in metrics.jsonl.
    """
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    heights = [3.6 if panel == LOSS else 1.5 for panel in panels]
    figure = Figure(figsize=(WIDTH, sum(heights) + 1 + 0.22 * len(runs)), layout=layout)
    figure.suptitle(title_of(runs), x=0.02, ha="left", weight="bold")
    grid = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        draw_panel(axes, panel, runs)
    last = grid[-1, 0]
    last.set_xlabel("optimizer step")
    last.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=True))
    if len(runs) > 1:
        handles = []
        for number, label in enumerate(labels_of(runs)):
            handles.append(Line2D([], [], label=plain(label), **look_of(number, len(runs))))
        figure.legend(handles=handles, loc="outside lower left", frameon=False)
    return figure


def draw_panel(axes: Axes, panel: str, runs: Sequence[RecordedRun]) -> None:
    """Draw the curve of each run that has one."""
    axes.set_ylabel(plain(panel_title(panel, runs)))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if panel == "learning_rate":
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    for number, run in enumerate(runs):
        look = look_of(number, len(runs))
        steps, values = run.curve(panel)
        if panel == LOSS:  # As it is and smoothed
            axes.plot(steps, values, color=look["color"], alpha=0.25, linewidth=0.8)
            values = smooth(values)
        axes.plot(steps, values, **look)
        if panel == LOSS:
            points: dict[str, Any] = {"color": look["color"], "markeredgecolor": "black"}
            axes.plot(*run.curve("eval_loss"), "o", zorder=3, **points)
    if panel in (*SPEEDS, MEMORY):
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    if panel == LOSS:
        finish_losses(axes, runs)


def finish_losses(axes: Axes, runs: Sequence[RecordedRun]) -> None:
    """Add the legend of lines and points; and a log scale, if the end would be a flat line."""
    color = COLORS[0] if len(runs) == 1 else "gray"
    handles = [Line2D([], [], color=color, linewidth=1.8, label="training, smoothed")]
    if any("eval_loss" in run.eval_metrics() for run in runs):
        style: dict[str, Any] = {"markeredgecolor": "black", "linestyle": "", "marker": "o"}
        handles.append(Line2D([], [], color=color, label="evaluation", **style))
    axes.legend(handles=handles, frameon=False)
    losses = []
    for run in runs:
        losses += [*run.curve(LOSS)[1], *run.curve("eval_loss")[1]]
    finite = [loss for loss in losses if math.isfinite(loss)]
    if finite and 0 < LOG_SCALE_FROM * min(finite) < max(finite):
        axes.set_yscale("log")
        axes.set_ylabel(f"{axes.get_ylabel()}, log scale")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: a $ would begin a formula."""
    return text.replace("$", r"\$")
