# SPDX-License-Identifier: Apache-2.0
"""What all pictures share: two themes, colors, sizes, and SVG files that are equal when redrawn."""

import io
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

WIDTH = 8.6  # inches; about the width of a README, so that text keeps its size there
FONT_SIZE = 10.0  # points
# Verdana has nearly the widths of DejaVu Sans, and most machines have it.
FONTS = ["DejaVu Sans", "Verdana", "Arial", "sans-serif"]


@dataclass(frozen=True)
class Theme:
    """Colors on a light or a dark page.

    The series are those of Okabe and Ito, which color-blind readers can tell apart; on the dark
    page some are lighter.
    """

    name: str
    background: str
    text: str
    muted: str  # for what is less important than text
    grid: str
    empty: str  # the background of a box
    series: dict[str, str]


LIGHT = Theme(
    name="light",
    background="#ffffff",
    text="#1f2328",
    muted="#59636e",
    grid="#d1d9e0",
    empty="#eef1f4",
    series={
        "blue": "#0072b2",
        "orange": "#e69f00",
        "green": "#009e73",
        "red": "#c2410c",
        "purple": "#a3578a",
        "sky": "#56b4e9",
        "gray": "#8c959f",
    },
)
DARK = Theme(
    name="dark",
    background="#0d1117",
    text="#e6edf3",
    muted="#9198a1",
    grid="#30363d",
    empty="#21262d",
    series={
        "blue": "#3b9ddd",
        "orange": "#e69f00",
        "green": "#14b88a",
        "red": "#f0743e",
        "purple": "#cc79a7",
        "sky": "#8fd0f5",
        "gray": "#7d8590",
    },
)
THEMES = (LIGHT, DARK)

# matplotlib's settings that are the same under each theme, and those with each of its colors
FIXED_SETTINGS = {
    "svg.fonttype": "none",  # text as text: it can be searched, and files stay small
    "svg.hashsalt": "pictures",  # the same ids in each drawing
    "font.family": "sans-serif",
    "font.sans-serif": FONTS,
    "font.size": FONT_SIZE,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
BACKGROUNDS = ("figure.facecolor", "savefig.facecolor", "axes.facecolor")
TEXTS = ("axes.labelcolor", "text.color", "xtick.labelcolor", "ytick.labelcolor")
MUTED = ("axes.edgecolor", "xtick.color", "ytick.color")


def settings(theme: Theme) -> dict[str, Any]:
    """Return matplotlib's settings under a theme."""
    found: dict[str, Any] = dict(FIXED_SETTINGS)
    found |= dict.fromkeys(BACKGROUNDS, theme.background)
    found |= dict.fromkeys(TEXTS, theme.text)
    found |= dict.fromkeys(MUTED, theme.muted)
    found["grid.color"] = theme.grid
    return found


def figure_of(theme: Theme, height: float, title: str, subtitle: str) -> Figure:
    """Return an empty figure with a title that says the point, and the setting below it.

    Args:
        height: in inches.
        subtitle: one or more lines.
    """
    figure = Figure(figsize=(WIDTH, height))
    left = 0.015
    top = 1 - 0.12 / height
    below = top - 0.27 / height
    figure.text(left, top, title, fontsize=13, weight="bold", va="top")
    style: dict[str, Any] = {"fontsize": 9, "color": theme.muted, "linespacing": 1.4}
    figure.text(left, below, subtitle, va="top", **style)
    return figure


def axes_in(
    figure: Figure, left: float, right: float, top: float, bottom: float, **options: Any
) -> Axes:
    """Return axes with these margins in inches."""
    width, height = figure.get_size_inches()
    inner_width = width - left - right
    inner_height = height - top - bottom
    corner = (left / width, bottom / height)
    place = (*corner, inner_width / width, inner_height / height)
    return figure.add_axes(place, **options)


def bare(axes: Axes) -> None:
    """Hide the axes' frame and ticks; what is drawn in them is a diagram."""
    axes.set_axis_off()


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG without a date, so that it is equal when it is drawn again."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines) + "\n"


def under(theme: Theme) -> Any:
    """Return a context in which matplotlib draws under a theme."""
    return matplotlib.rc_context(settings(theme))
