# SPDX-License-Identifier: Apache-2.0
"""How fast the recipe is beside other tools, from results/speed.json."""

import statistics

from tables_speed import Row, cell_of, labels_of, name_of, paired, values

from .style import Theme, axes_in, figure_of, to_svg

CELL = "shipped, medium"
OURS = "ours"
RATE = "tokens_per_second"


def draw_speed(theme: Theme) -> str:
    """Return the bars of real tokens per second, the fastest first."""
    cell = cell_of(CELL)
    rates = median_rates(cell)
    figure = figure_of(theme, 3.3, title_of(cell, rates), subtitle_of(cell))
    axes = axes_in(figure, left=1.75, right=1.75, top=0.95, bottom=0.5)
    order = sorted(rates, key=lambda label: rates[label])
    names = [name_of(cell, label) for label in order]
    colors = [theme.series["blue" if label == OURS else "gray"] for label in order]
    bars = axes.barh(names, [rates[label] for label in order], 0.66, color=colors)
    axes.bar_label(bars, [text_of(cell, label, rates) for label in order], padding=5)
    axes.set_xlabel("tokens per second, without padding (median of repeats)")
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    return to_svg(figure)


def median_rates(cell: Row) -> dict[str, float]:
    """Return the median of the tokens per second of each contestant that has any, by label."""
    rates = {}
    for label in labels_of(cell):
        found = list(values(cell, label, RATE).values())
        if found:
            rates[label] = statistics.median(found)
    return rates


def ratio_to(cell: Row, label: str) -> float:
    """Return how many times the rate of a contestant ours is: the median over the repeats."""
    return statistics.median(paired(cell, OURS, label, RATE))


def text_of(cell: Row, label: str, rates: dict[str, float]) -> str:
    """Return what stands at the end of a bar."""
    rate = f"{rates[label]:,.0f}"
    if label == OURS:
        return rate
    return f"{rate}  (this recipe: {ratio_to(cell, label):.1f}x)"


def title_of(cell: Row, rates: dict[str, float]) -> str:
    """Return the point of the picture: how much faster the recipe is than the next tool."""
    others = [label for label in rates if label not in (OURS, "floor")]
    fastest = max(others, key=lambda label: rates[label])
    ratio = ratio_to(cell, fastest)
    return f"With packing, the recipe trains {ratio:.1f}x as fast as {name_of(cell, fastest)}"


def subtitle_of(cell: Row) -> str:
    """Return the setting: model, rows, precision, hardware, versions, and what is missing."""
    versions = cell["versions"]
    libraries = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "trl"))
    device = cell["device"].replace("a process", "per process")
    return (
        f"36M-parameter Llama on GSM8K, fp32, each tool with its own defaults. {device}.\n"
        f"{libraries}; measured {cell['date']}. This model was not yet measured on a GPU."
    )
