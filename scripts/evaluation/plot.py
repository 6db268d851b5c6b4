# SPDX-License-Identifier: Apache-2.0
"""The picture of the results: a panel for each metric, a bar with its error for each model."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Picture
from matplotlib.layout_engine import ConstrainedLayoutEngine

from evaluation.report import DIRECTIONS, Measured, keys_of, with_error
from exits import Exit, stop

LEFT_OUT = ("perplexity",)  # the exponential of the loss, which is there
# A base is gray, and models in the order of the command line have these colors, which are those of
# Okabe and Ito: color-blind readers can tell them apart.
BASE = "#8c959f"
COLORS = ("#0072b2", "#e69f00", "#009e73", "#c2410c", "#a3578a", "#56b4e9")
WIDTH = 8  # inches, as the pictures of scripts/plot_loss.py
BAR = 0.26  # inches
AROUND = 0.75  # inches, of a panel beside its bars
BARS = 0.84  # share of the room of a task that its bars take
PAST_LONGEST = 1.08  # the last tick over the longest bar; an accuracy has none above 1
LABELS = 1.25  # the end of an axis over the longest bar, which leaves room for a number


def draw(measured: Sequence[Measured]) -> Picture:
    """Return the picture of all figures but the perplexity."""
    panels = panels_of(measured)
    heights = []
    for tasks in panels.values():
        heights.append(AROUND + BAR * len(tasks) * (len(measured) + 0.5))
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)  # inches
    picture = Picture(figsize=(WIDTH, sum(heights) + 0.8), layout=layout)
    picture.suptitle(title_of(measured), x=0.02, ha="left", weight="bold")
    grid = picture.subplots(len(panels), 1, height_ratios=heights, squeeze=False)
    for axes, (metric, tasks) in zip(grid[:, 0], panels.items(), strict=True):
        draw_panel(axes, metric, tasks, measured)
    handles, names = grid[0, 0].get_legend_handles_labels()
    picture.legend(handles, names, loc="outside lower left", frameon=False, ncols=2)
    return picture


def panels_of(measured: Sequence[Measured]) -> dict[str, list[str]]:
    """Return {metric: tasks that have it}."""
    panels: dict[str, list[str]] = {}
    for task, metric in keys_of(measured):
        if metric not in LEFT_OUT:
            panels.setdefault(metric, []).append(task)
    return panels


def title_of(measured: Sequence[Measured]) -> str:
    """Return what the picture compares."""
    if any(one.contestant.before is not None for one in measured):
        return "Before and after training"
    if len(measured) == 1:
        return measured[0].contestant.name
    return f"{len(measured)} models"


def colors_of(measured: Sequence[Measured]) -> list[str]:
    """Return a color for each model: gray for a base."""
    bases = {one.contestant.before for one in measured}
    colors = []
    number = 0
    for one in measured:
        if one.contestant.name in bases:
            colors.append(BASE)
            continue
        colors.append(COLORS[number % len(COLORS)])
        number += 1
    return colors


def draw_panel(axes: Axes, metric: str, tasks: Sequence[str], measured: Sequence[Measured]) -> None:
    """Draw the bars of a metric, with one group for each task."""
    height = BARS / len(measured)
    ends = [0.0]
    values = [0.0]
    better = None
    for number, (one, color) in enumerate(zip(measured, colors_of(measured), strict=True)):
        label = one.contestant.name
        for place, task in enumerate(tasks):
            figure = one.find((task, metric))
            if figure is None:
                continue
            better = figure.higher_is_better
            middle = place + (number + 0.5) * height - BARS / 2
            error = figure.stderr or 0.0
            axes.barh(middle, figure.value, 0.9 * height, color=color, label=label)
            if figure.stderr is not None:
                axes.errorbar(figure.value, middle, xerr=error, color="black", capsize=2.5, lw=1)
            text = with_error(figure.value, figure.stderr)
            end = max(figure.value, 0.0) + error
            axes.annotate(
                text, (end, middle), (5, 0), textcoords="offset points", va="center", fontsize=8
            )
            ends.append(end)
            values.append(figure.value)
            label = "_nolegend_"  # once for each model
    axes.set_yticks(range(len(tasks)), tasks)
    axes.invert_yaxis()
    longest = max(ends) or 1.0
    if min(values) >= 0:
        axes.set_xlim(left=0)  # also where all are 0, around which matplotlib leaves room
    axes.set_xlim(right=longest * LABELS)
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= longest * PAST_LONGEST])
    direction = "" if better is None else f" ({DIRECTIONS[better]} is better)"
    axes.set_title(metric + direction, loc="left", fontsize=10)
    axes.grid(axis="x", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def write_plot(path: Path, measured: Sequence[Measured]) -> None:
    """Write the picture; exit with 73 if it cannot be written."""
    try:
        draw(measured).savefig(path, dpi=150)
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {error.strerror}")
