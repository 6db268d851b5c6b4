# SPDX-License-Identifier: Apache-2.0
"""The picture of the results of scripts/benchmark.py."""

import statistics
from pathlib import Path
from typing import Any

from .cells import Result, Results
from .figures import labels_of, name_of, named, values

# Cells of growth, and what grows in them
GROWTH = {
    "length": "tokens per row",
    "batch": "rows per step",
    "ranks": "CPU ranks",
    "model": "parameters",
}
SIZES = {"medium": "36M"}  # of models whose names do not state it


def draw(results: Results, path: Path) -> None:
    """Draw real tokens per second into a file.

    On the left are the tools as shipped, on the right our speed against length, batch, ranks and
    size of the model.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    halves: Any = figure.subfigures(1, 2, width_ratios=[1, 1.25])
    left, right = halves
    draw_bars(left.subplots(), named(results, "shipped, medium"))
    plots = right.subplots(2, 2).flat
    for axes, (name, label) in zip(plots, GROWTH.items(), strict=True):
        draw_growth(axes, named(results, f"growth, {name}"), label)
    right.supylabel("real tokens/s", fontsize="medium")
    figure.savefig(path, dpi=150)


def rates_of(cell: Result | None) -> dict[str, list[float]]:
    """Return the real tokens per second of each contestant that has any, by label."""
    if cell is None:
        return {}
    rates = {}
    for label in labels_of(cell):
        found = list(values(cell, label, "tokens_per_second").values())
        if found:
            rates[label] = found
    return rates


def draw_bars(axes: Any, cell: Result | None) -> None:
    """Draw the median rate of each contestant, with the range of the repeats."""
    axes.set_xlabel("real tokens/s, as shipped, one CPU thread")
    tidy(axes)
    rates = rates_of(cell)
    if cell is None or not rates:
        return
    medians = [statistics.median(found) for found in rates.values()]
    below = [statistics.median(found) - min(found) for found in rates.values()]
    above = [max(found) - statistics.median(found) for found in rates.values()]
    bars = axes.barh(
        [name_of(cell, label) for label in rates],
        medians,
        color=["C0" if label == "ours" else "0.7" for label in rates],
        xerr=[below, above],
        error_kw={"elinewidth": 1, "capsize": 2},
    )
    texts = [f"{median:,.0f}" for median in medians]
    axes.bar_label(bars, texts, label_type="center", color="white", weight="bold")
    axes.invert_yaxis()


def draw_growth(axes: Any, cell: Result | None, label: str) -> None:
    """Draw the median rate against one quantity, with the range of the repeats."""
    axes.set_xlabel(label)
    tidy(axes)
    rates = rates_of(cell)
    if not rates:
        return
    low = [min(found) for found in rates.values()]
    high = [max(found) for found in rates.values()]
    places = range(len(rates))
    axes.fill_between(places, low, high, alpha=0.2)
    axes.plot(places, [statistics.median(found) for found in rates.values()], "o-")
    axes.set_xticks(places, [SIZES.get(name, name) for name in rates])
    if max(high) > 10 * min(low):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, max(high) * 1.15)


def tidy(axes: Any) -> None:
    """Draw a light grid behind the curves, and no frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
