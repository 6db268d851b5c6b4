# SPDX-License-Identifier: Apache-2.0
"""When the ranks of a pipeline compute what, under each schedule, from a recorded run."""

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from .passes import Batch, Pass, duration_of, idle_share
from .recordings import recording_of
from .style import Theme, axes_in, figure_of, to_svg

NAMES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved 1F1B",
    "interleaved_zero_bubble": "interleaved zero bubble",
    "zbv": "ZBV",
}
COLORS = {"forward": "blue", "backward": "orange", "weights": "green"}
WORDS = {
    "forward": "forward pass",
    "backward": "backward pass",
    "weights": "gradients of weights, computed later",
}
SECOND_STAGE = 0.6  # opacity of the passes of a rank's second stage
PANEL = 0.82  # inches of a schedule
TOP = 1.15
BOTTOM = 0.55
BAR = 0.8  # height of a rank's row, of 1
NARROW = 0.012  # the share of the axis below which a pass has no room for its number


def draw_pipeline(theme: Theme) -> str:
    """Return a panel for each schedule, with a row for each rank and a box for each pass."""
    recording = recording_of("pipeline")
    batches = {name: recording["schedules"][name] for name in NAMES}
    height = TOP + BOTTOM + PANEL * len(batches)
    figure = figure_of(theme, height, title_of(batches), subtitle_of(recording))
    longest = max(milliseconds_of(batch) for batch in batches.values())
    bottom = height - TOP - PANEL + 0.3
    for number, (name, batch) in enumerate(batches.items()):
        below = PANEL * number
        axes = axes_in(figure, left=0.6, right=0.15, top=TOP + below, bottom=bottom - below)
        draw_batch(axes, theme, batch, longest)
        text = f"{NAMES[name]}: {milliseconds_of(batch):.0f} ms, idle {idle_share(batch):.0%}"
        axes.set_title(text, loc="left", fontsize=9, pad=3)
        is_last = number == len(batches) - 1
        axes.tick_params(axis="x", labelbottom=is_last)
        if is_last:
            axes.set_xlabel("milliseconds")
    figure.legend(handles=legend_of(theme), loc="lower left", ncols=4, fontsize=8.5)
    return to_svg(figure)


def legend_of(theme: Theme) -> list[Patch]:
    """Return a box of each color, and what it means."""
    boxes = []
    for kind, color in COLORS.items():
        boxes.append(Patch(color=theme.series[color], label=WORDS[kind]))
    boxes.append(Patch(color=theme.empty, label="idle"))
    return boxes


def milliseconds_of(batch: Batch) -> float:
    """Return how long a batch takes."""
    return 1000 * duration_of(batch)


def title_of(batches: dict[str, Batch]) -> str:
    """Return the point of the picture."""
    shares = [idle_share(batch) for batch in batches.values()]
    return (
        f"The schedule decides how long ranks wait: {min(shares):.0%} to {max(shares):.0%} of the "
        "time"
    )


def subtitle_of(recording: dict) -> str:
    """Return the setting, and how to read the picture."""
    return (
        f"One batch of {recording['micro_batches']} micro-batches through a Llama of "
        f"{recording['layers']} layers on 2 ranks, one CPU core each, fp32; numbers are those of\n"
        "micro-batches, and paler boxes the second stage of a rank. Not yet measured on a GPU."
    )


def draw_batch(axes: Axes, theme: Theme, batch: Batch, longest: float) -> None:
    """Draw the passes of each rank from left to right.

    Args:
        longest: milliseconds of the axis.
    """
    ranks = range(len(batch))
    axes.set_xlim(0, longest)
    axes.set_ylim(len(batch) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.barh(ranks, milliseconds_of(batch), BAR, color=theme.empty)
    for rank, passes in enumerate(batch):
        first_stage = min(one["stage"] for one in passes)
        for one in passes:
            opacity = 1 if one["stage"] == first_stage else SECOND_STAGE
            draw_pass(axes, theme, rank, one, opacity)


def draw_pass(axes: Axes, theme: Theme, rank: int, one: Pass, opacity: float) -> None:
    """Draw the box of a pass, with the number of its micro-batch if there is room."""
    start = 1000 * one["start"]
    width = 1000 * one["end"] - start
    color = theme.series[COLORS[one["kind"]]]
    style = {"alpha": opacity, "edgecolor": theme.background, "linewidth": 0.4}
    axes.barh(rank, width, BAR, left=start, color=color, **style)
    longest = axes.get_xlim()[1]
    if width > NARROW * longest:
        number = one["micro_batch"] + 1
        place = (start + width / 2, rank)
        style = {"fontsize": 6.5, "color": theme.background}
        axes.text(*place, str(number), ha="center", va="center", **style)
