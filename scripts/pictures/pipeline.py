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
NARROW = 0.012  # the share of the axis below which a pass has no room for its number


def draw_pipeline(theme: Theme) -> str:
    """Return a panel for each schedule, with a row for each rank and a box for each pass."""
    recording = recording_of("pipeline")
    batches = {name: recording["schedules"][name] for name in NAMES}
    height = TOP + BOTTOM + PANEL * len(batches)
    longest = 1000 * max(duration_of(batch) for batch in batches.values())
    figure = figure_of(theme, height, title_of(batches), subtitle_of(recording))
    for number, (name, batch) in enumerate(batches.items()):
        top = TOP + PANEL * number
        axes = axes_in(figure, left=0.6, right=0.15, top=top, bottom=height - top - PANEL + 0.3)
        draw_batch(axes, theme, batch, longest)
        text = f"{NAMES[name]}: {1000 * duration_of(batch):.0f} ms, idle {idle_share(batch):.0%}"
        axes.set_title(text, loc="left", fontsize=9, pad=3)
        axes.tick_params(axis="x", labelbottom=number == len(batches) - 1)
    axes.set_xlabel("milliseconds")
    boxes = [Patch(color=theme.series[COLORS[kind]], label=WORDS[kind]) for kind in COLORS]
    boxes.append(Patch(color=theme.empty, label="idle"))
    figure.legend(handles=boxes, loc="lower left", ncols=4, fontsize=8.5)
    return to_svg(figure)


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
        "micro-batches, and lighter boxes the second stage of a rank. Not yet measured on a GPU."
    )


def draw_batch(axes: Axes, theme: Theme, batch: Batch, longest: float) -> None:
    """Draw the passes of each rank from left to right.

    Args:
        longest: milliseconds of the axis.
    """
    axes.set_xlim(0, longest)
    axes.set_ylim(len(batch) - 0.5, -0.5)
    axes.set_yticks(range(len(batch)), [f"rank {rank}" for rank in range(len(batch))], fontsize=8)
    axes.tick_params(axis="y", length=0)
    for rank, passes in enumerate(batch):
        axes.barh(rank, 1000 * duration_of(batch), 0.8, color=theme.empty)
        first = min(one["stage"] for one in passes)
        for one in passes:
            draw_pass(axes, theme, rank, one, is_second=one["stage"] != first)


def draw_pass(axes: Axes, theme: Theme, rank: int, one: Pass, is_second: bool) -> None:
    """Draw the box of a pass, with the number of its micro-batch if there is room."""
    start = 1000 * one["start"]
    width = 1000 * one["end"] - start
    axes.barh(
        rank,
        width,
        0.8,
        left=start,
        color=theme.series[COLORS[one["kind"]]],
        alpha=SECOND_STAGE if is_second else 1,
        edgecolor=theme.background,
        linewidth=0.4,
    )
    if width > NARROW * axes.get_xlim()[1]:
        axes.text(
            start + width / 2,
            rank,
            str(one["micro_batch"] + 1),
            ha="center",
            va="center",
            fontsize=6.5,
            color=theme.background,
        )
