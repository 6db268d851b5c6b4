# SPDX-License-Identifier: Apache-2.0
"""The picture of one run, or of several beside each other."""

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.gridspec import GridSpec
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

from plotting.calls import COUNTS, speed_name, times_of
from plotting.curves import Curve, curve_of
from plotting.labels import labels_of
from plotting.panels import LOSS, MEMORY, RATE, Panel
from plotting.runs import RecordedRun

# The colors of Okabe and Ito, which color-blind readers can tell apart; the sixth run has the
# first color again, with dashes
COLORS = ["#0072b2", "#e69f00", "#009e73", "#c2410c", "#a3578a"]
STYLES = [("-", "o"), ((0, (4, 1.5)), "s")]  # a line and its points
MOST_RUNS = len(COLORS) * len(STYLES)
LOG_SCALE_FROM = 5  # the largest loss over the smallest
X_LABELS = {
    "step": "optimizer step",
    "num_input_tokens_seen": "tokens seen",
    "num_images_seen": "images seen",
    "time": "seconds of training",
}
THINNEST = 1.6  # points; the width of the line of the last run
WIDER = 1.0  # points; how much wider a line is than the next one
MOST_WIDER = 2.5  # points; by all runs together
WIDTH = 8.0  # inches
WIDTH_OF_GRID = 10.0
HEIGHT_OF_LABEL = 0.22
LABEL_WIDTH = 110  # characters


@dataclass(frozen=True)
class Look:
    """How a run is drawn.

    Attributes:
        line, marker: matplotlib's names of a style of lines and of points.
        width: of lines, in points.
    """

    color: str
    line: Any
    marker: str
    width: float

    @classmethod
    def of(cls, number: int, num_runs: int) -> "Look":
        """Return the look of a run, which no other of the first MOST_RUNS has.

        Each line is wider than those that are drawn over it, so that equal runs are all seen.
        """
        line, marker = STYLES[number // len(COLORS) % len(STYLES)]
        later = num_runs - 1 - number
        width = THINNEST + later * min(WIDER, MOST_WIDER / num_runs)
        return cls(COLORS[number % len(COLORS)], line, marker, width)

    @property
    def of_line(self) -> dict[str, Any]:
        """The options of a line."""
        return {"color": self.color, "linestyle": self.line, "linewidth": self.width}


# ---- The horizontal axis ----


def find_axis(runs: Sequence[RecordedRun], axis: str) -> str:
    """Return the key of X_LABELS for --x. Raises ValueError if the runs cannot be drawn over it."""
    if axis == "step":
        return axis
    counts = set()
    for run in runs:
        speed = speed_name(run)
        if speed is None:
            raise ValueError(
                f"--x {axis}: {run.folder} has not recorded how much it saw and when: it is of an "
                "earlier version; use --x step"
            )
        counts.add(COUNTS[speed])
    if axis == "time":
        return axis
    if len(counts) > 1:
        raise ValueError("--x tokens: some runs count tokens and some images; use --x step or time")
    return counts.pop()


def positions(run: RecordedRun, axis: str, steps: Sequence[float]) -> list[float]:
    """Return where steps of a run are on an axis. Between logged steps it is interpolated."""
    if axis == "step":
        return list(steps)
    known = times_of(run)
    if axis != "time":
        known = curve_of(run.steps, axis)
    return np.interp(steps, [0, *known.steps], [0, *known.values]).tolist()


# ---- Drawing ----


def draw(runs: Sequence[RecordedRun], panels: Sequence[Panel], axis: str = "step") -> Figure:
    """Return the picture of all runs.

    Args:
        axis: a key of X_LABELS.
    """
    labels = [wrapped(label) for label in labels_of(runs)]
    figure, all_axes = empty_figure(panels, labels)
    figure.suptitle(title_of(runs), x=0.02, ha="left", weight="bold")
    for panel, axes in zip(panels, all_axes, strict=True):
        draw_panel(axes, panel, runs, axis)
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10], integer=axis != "time"))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if is_lowest(axes, all_axes):
            axes.set_xlabel(X_LABELS[axis])
        elif len(panels) == 2:  # with more, those below may be of another width
            axes.tick_params(labelbottom=False)
        if panel.name == LOSS:
            axes.legend(handles=kind_handles(runs), frameon=False)
    if len(runs) > 1:
        figure.legend(handles=name_handles(labels), loc="outside lower left", frameon=False)
    return figure


def empty_figure(panels: Sequence[Panel], labels: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """Return a figure and the axes of its panels: the first is wide, the rest share rows."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)  # inches
    label_lines = sum(label.count("\n") + 1 for label in labels if label)
    below = HEIGHT_OF_LABEL * label_lines
    if len(panels) <= 2:
        ratios = [4.0, 4.0][: len(panels)]
        if panels[-1].name == RATE and len(panels) == 2:
            ratios = [4.0, 1.0]
        figure = Figure(figsize=(WIDTH, 5.5 + below), layout=layout)
        stacked = figure.subplots(len(panels), 1, sharex=True, height_ratios=ratios, squeeze=False)
        return figure, list(stacked[:, 0])
    rows = 1 + math.ceil((len(panels) - 1) / 2)
    ratios = [1.6] + [1.0] * (rows - 1)
    figure = Figure(figsize=(WIDTH_OF_GRID, 2.2 * sum(ratios) + below), layout=layout)
    grid = GridSpec(rows, 2, figure=figure, height_ratios=ratios)
    all_axes = [figure.add_subplot(grid[0, :])]
    for number in range(len(panels) - 1):
        row = 1 + number // 2
        place = grid[row, number % 2]
        if number == len(panels) - 2 and number % 2 == 0:
            place = grid[row, :]
        all_axes.append(figure.add_subplot(place, sharex=all_axes[0]))
    return figure, all_axes


def is_lowest(axes: Axes, all_axes: Sequence[Axes]) -> bool:
    """Return whether axes are in the lowest row of the picture."""
    lowest = all_axes[-1].get_subplotspec()
    place = axes.get_subplotspec()
    assert lowest is not None and place is not None  # all axes here are in a grid
    return place.rowspan.stop == lowest.rowspan.stop


def draw_panel(axes: Axes, panel: Panel, runs: Sequence[RecordedRun], axis: str) -> None:
    """Draw the curve of each run that has one."""
    axes.set_ylabel(plain(panel.title))
    if panel.name == RATE:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    for number, (run, curve) in enumerate(zip(runs, panel.curves, strict=True)):
        look = Look.of(number, len(runs))

        def place(steps: Sequence[float], run: RecordedRun = run) -> list[float]:
            return positions(run, axis, steps)

        if panel.name == LOSS:
            draw_losses(axes, curve, curve_of(run.evaluations, "eval_loss"), look, place)
        elif panel.name.startswith("eval_"):
            draw_line(axes, curve, look, place, marker=look.marker)
        elif panel.name in COUNTS:
            draw_noisy(axes, curve, look, place)
        else:
            draw_line(axes, curve, look, place)
    if panel.name in COUNTS or panel.name == MEMORY:
        axes.set_ylim(0, 1.1 * axes.dataLim.ymax)
    if panel.name == LOSS:
        if needs_log_scale(runs):
            axes.set_yscale("log")
            axes.set_ylabel(f"{panel.title}, log scale")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
            axes.yaxis.set_minor_formatter(NullFormatter())


Place = Callable[[Sequence[float]], list[float]]  # from steps to positions on the axis


def draw_losses(axes: Axes, training: Curve, evaluations: Curve, look: Look, place: Place) -> None:
    """Draw a run's training loss, as it is and smoothed, and its evaluations."""
    draw_noisy(axes, training, look, place)
    style = {"color": look.color, "markeredgecolor": "black", "zorder": 3}
    axes.plot(place(evaluations.steps), evaluations.values, look.marker, **style)


def draw_noisy(axes: Axes, curve: Curve, look: Look, place: Place) -> None:
    """Draw a curve as it is and smoothed."""
    axes.plot(place(curve.steps), curve.values, color=look.color, alpha=0.25, linewidth=0.8)
    draw_line(axes, curve.smoothed(), look, place)


def draw_line(axes: Axes, curve: Curve, look: Look, place: Place, marker: str = "") -> None:
    """Draw a curve as a line, through points if a marker is given."""
    axes.plot(place(curve.steps), curve.values, marker=marker, **look.of_line)


def name_handles(labels: Sequence[str]) -> list[Line2D]:
    """Return the entries of a legend that name the runs."""
    handles = []
    for number, label in enumerate(labels):
        look = Look.of(number, len(labels))
        handles.append(Line2D([], [], marker=look.marker, label=plain(label), **look.of_line))
    return handles


def kind_handles(runs: Sequence[RecordedRun]) -> list[Line2D]:
    """Return the entries of a legend that say what lines and points in the panel of losses are."""
    color = COLORS[0] if len(runs) == 1 else "gray"
    handles = [Line2D([], [], color=color, linewidth=1.8, label="training, smoothed")]
    if any(curve_of(run.evaluations, "eval_loss").steps for run in runs):
        style: dict[str, Any] = {"color": color, "markeredgecolor": "black", "linestyle": ""}
        handles.append(Line2D([], [], marker="o", label="evaluation", **style))
    return handles


# ---- Words ----


def title_of(runs: Sequence[RecordedRun]) -> str:
    """Return the point of the picture: how far the loss of a run fell, or how many runs there are.

    One step is a matter of luck, so the title compares means over the first and the last twentieth
    of the steps.
    """
    if len(runs) > 1:
        return f"{len(runs)} runs compared"
    losses = curve_of(runs[0].steps, "loss")
    direction = "fell" if losses.last() < losses.first() else "did not fall:"
    change = f"from {losses.first():.3g} to {losses.last():.3g}"
    return f"The loss {direction} {change} in {losses.steps[-1]} steps"


def plain(text: str) -> str:
    """Return a text that matplotlib draws as it is: a $ would begin a formula."""
    return text.replace("$", r"\$")


def wrapped(label: str) -> str:
    """Return a label in lines that fit below the picture."""
    return "\n".join(textwrap.wrap(label, LABEL_WIDTH))


def needs_log_scale(runs: Sequence[RecordedRun]) -> bool:
    """Whether a linear axis would show the end of a run as a flat line, and a log axis can be."""
    losses = []
    for run in runs:
        losses += curve_of(run.steps, "loss").values
        losses += curve_of(run.evaluations, "eval_loss").values
    finite = [loss for loss in losses if math.isfinite(loss)]
    return bool(finite) and 0 < LOG_SCALE_FROM * min(finite) < max(finite)
