# SPDX-License-Identifier: Apache-2.0
"""The pictures of a plan: every strategy against the card, and the peak against the length."""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter
from transformers import PretrainedConfig

from .cards import GIB, with_constants
from .closed_form import closed_form
from .errors import UnplannableError
from .ledger import Sizes
from .plan import Plan
from .request import Batch

COLORS = {
    "parameters": "#3b6ea5",
    "quantization": "#6f9bc8",
    "adapters": "#a7c4e2",
    "whole modules": "#5fa8a0",
    "unsharded": "#1f3f66",
    "working copies": "#86a8c7",
    "master copies": "#7b5ea7",
    "optimizer": "#a98fce",
    "gradients": "#c8553d",
    "activations": "#e0a458",
    "logits": "#f0cf8e",
    "communication": "#6a994e",
    "constants": "#b8b8b8",
}
LENGTHS = [2**power for power in range(9, 18)]  # tokens
CURVES = 6
BAR_HEIGHT = 0.72


def draw(
    title: str,
    plans: Mapping[str, Plan],
    config: PretrainedConfig,
    batch: Batch,
    card: int | None,
) -> Figure:
    """Return a figure with both pictures.

    Args:
        title: above the pictures.
        plans: by name.
        config: of the model.
        batch: a micro-batch of each rank.
        card: bytes, or None.
    """
    heights = [0.28 * len(plans) + 0.6, 3.2]
    figure = Figure(figsize=(9, sum(heights) + 0.7), layout="constrained")
    bars, curves = figure.subplots(2, 1, height_ratios=heights)
    devices = {}
    for name, plan in plans.items():
        with leaving_out_uncovered(plan):
            devices[name] = held(plan, config, batch)
    order = sorted(devices, key=lambda name: sum(devices[name].values()), reverse=True)
    draw_bars(bars, devices, order)
    bars.set_title(title, fontsize=10, loc="left")
    drawn = {name: plans[name] for name in spread(order)}
    draw_curves(curves, drawn, config, batch)
    if card:
        draw_card(bars, curves, card)
    for axes in (bars, curves):
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.grid(alpha=0.25)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    curves.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    return figure


def write(figure: Figure, path: str) -> None:
    """Write a figure to a file, whose suffix decides the format.

    Raises matplotlib's OSError or ValueError.
    """
    figure.savefig(path, dpi=150)


def leaving_out_uncovered(plan: Plan) -> contextlib.AbstractContextManager[None]:
    """Return a context that leaves out a mesh whose memory the closed form does not know."""
    if plan.copies > 1:
        return contextlib.suppress(UnplannableError)
    return contextlib.nullcontext()


def draw_bars(axes: Axes, devices: Mapping[str, Sizes], order: Sequence[str]) -> None:
    """Draw a bar for each strategy, split by category."""
    left = dict.fromkeys(order, 0.0)
    for category, color in COLORS.items():
        sizes = {name: devices[name].get(category, 0) / GIB for name in order}
        if any(sizes.values()):
            widths = list(sizes.values())
            places = list(left.values())
            axes.barh(order, widths, BAR_HEIGHT, places, color=color, label=category)
        for name, size in sizes.items():
            left[name] += size
    axes.set_xlabel("peak GiB per GPU")
    axes.set_ylim(-0.75, len(order) - 0.25)


def draw_curves(
    axes: Axes, plans: Mapping[str, Plan], config: PretrainedConfig, batch: Batch
) -> None:
    """Draw the peak of each strategy against the length of the rows."""
    for number, (name, plan) in enumerate(plans.items()):
        sizes = [peak_in_gib(plan, config, batch, length) for length in LENGTHS]
        axes.plot(LENGTHS, sizes, "o-", markersize=3, color=f"C{number}", label=name)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel=f"tokens per row, {batch.sequences} rows per micro-batch",
        ylabel="GiB",
    )
    axes.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS], fontsize=8)
    axes.minorticks_off()


def draw_card(bars: Axes, curves: Axes, card: int) -> None:
    """Draw the size of the card into both pictures."""
    size = card / GIB
    style = {"color": "black", "linestyle": "--", "linewidth": 1}
    for mark in (bars.axvline, curves.axhline):
        mark(size, label=f"card, {size:.0f} GiB", **style)


def held(plan: Plan, config: PretrainedConfig, batch: Batch) -> Sizes:
    """Return {category: bytes} of a GPU at its peak."""
    device, _ = closed_form(plan, config, batch)
    return with_constants(device, plan.ranks)


def peak_in_gib(plan: Plan, config: PretrainedConfig, batch: Batch, length: int) -> float:
    """Return the GiB at the peak with rows of another length and the same share supervised."""
    supervised = max(batch.supervised * length // batch.length, 1)
    longer = replace(batch, length=length, supervised=supervised)
    return sum(held(plan, config, longer).values()) / GIB


def spread(names: Sequence[str]) -> list[str]:
    """Return at most CURVES of the names, the first and the last among them."""
    if len(names) <= CURVES:
        return list(names)
    distance = (len(names) - 1) / (CURVES - 1)
    places = [round(number * distance) for number in range(CURVES)]
    return [names[place] for place in places]
