# SPDX-License-Identifier: Apache-2.0
"""What each of four ranks holds, computes with and sees under each mesh, from recorded steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from .recordings import Recording, recording_of
from .style import WIDTH, Theme, axes_in, bare, figure_of, to_svg

RANKS = 4
TITLE = "What each of 4 ranks has: parts of matrices, rows, experts or layers"
# Sizes in inches
TOP = 1.18
BOTTOM = 0.42
ROW = 0.92  # the height of a mesh
LABELS = 1.75  # the width of their names
CELL = 1.7  # from one rank to the next
SCALE = 0.36 / 640  # the size of a number of a matrix
GAP = 0.07  # between matrices
LINE = 0.13  # the height of a row of tokens
TOKENS = 0.7  # where the rows of tokens begin in a cell
TOKEN = 0.8 / 36  # the width of a token
GATHERED = 0.35  # opacity of what a rank has while it computes a layer


@dataclass(frozen=True)
class Shown:
    """A recorded run, and its names in the picture."""

    name: str
    config: str
    flags: tuple[str, ...] = ()
    more: str = ""  # what is written beside the YAML


SHOWN = (
    Shown("DDP", "ddp"),
    Shown("FSDP2", "fsdp2_full_shard"),
    Shown("TP 4", "tp"),
    Shown("FSDP2 2 x TP 2", "fsdp2_tp"),
    Shown("FSDP2 2 x CP 2", "fsdp2_cp"),
    Shown("ZeRO-3, SP 2", "deepspeed_ulysses"),
    Shown("EP 4", "ep", ("--ep_size", "4")),
    Shown("EP 2 x FSDP2 2", "fsdp2_ep", ("--ep_size", "2")),
    Shown("PP 2, 2 pipelines", "pp", ("--pp_size", "2")),
    Shown("PP 2 x FSDP2 2", "pp", ("--pp_size", "2", "--shard_stages"), " --shard_stages"),
)


def draw_meshes(theme: Theme) -> str:
    """Return a line for each mesh, with the weights and the tokens of each rank."""
    recording = recording_of("meshes")
    height = TOP + BOTTOM + ROW * len(SHOWN)
    subtitle = (
        "Left in each cell: two matrices of each of two layers (up, down), under EP those of 4 "
        "experts side by side.\n"
        "Right: the tokens of the 4 rows of a step, which under EP also travel to their experts.\n"
        "Recorded in the first step on CPU ranks: each part was found in the whole by its values."
    )
    figure = figure_of(theme, height, TITLE, subtitle)
    axes = axes_in(figure, left=0, right=0, top=0, bottom=0)
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)  # inches from the top
    bare(axes)
    for rank in range(RANKS):
        style: dict[str, Any] = {"color": theme.muted, "fontsize": 9, "va": "center"}
        axes.text(LABELS + CELL * rank, TOP - 0.14, f"rank {rank}", **style)
    for number, shown in enumerate(SHOWN):
        run = run_of(recording, shown)
        top = TOP + ROW * number
        model = recording["models"][run["model"]]
        draw_names(axes, theme, top, shown, run, model)
        for rank in range(RANKS):
            corner = (LABELS + CELL * rank, top)
            draw_weights(axes, theme, corner, model["matrices"], run, rank)
            draw_tokens(axes, theme, corner, recording["rows"], run["tokens"][rank])
    legend: dict[str, Any] = {"ncols": 4, "fontsize": 8.5, "columnspacing": 1.2}
    figure.legend(handles=boxes_of_legend(theme), loc="lower left", **legend)
    return to_svg(figure)


def run_of(recording: Recording, shown: Shown) -> dict[str, Any]:
    """Return the recorded run that is drawn under a name."""
    for run in recording["runs"]:
        if run["config"] == shown.config and tuple(run["flags"]) == shown.flags:
            return run
    raise ValueError(f"results/curves.json has no run of {shown}")


def boxes_of_legend(theme: Theme) -> list[Patch]:
    """Return a box of each color, and what it means."""
    blue = theme.series["blue"]
    return [
        Patch(color=blue, label="weights that the rank holds"),
        Patch(color=blue, alpha=GATHERED, label="gathered for each layer", linewidth=0),
        Patch(color=theme.series["orange"], label="tokens that go through it"),
        Patch(color=theme.empty, label="on other ranks"),
    ]


def draw_names(
    axes: Axes,
    theme: Theme,
    top: float,
    shown: Shown,
    run: Mapping[str, Any],
    model: Mapping[str, Any],
) -> None:
    """Write the name of a mesh, its YAML, and the share of the weights that a rank holds."""
    share = max(run["bytes"]["parameters"]) / model["bytes"]["parameters"][0]
    axes.text(0.13, top + 0.16, shown.name, weight="bold", va="center")
    style: dict[str, Any] = {"color": theme.muted, "fontsize": 8, "va": "center"}
    axes.text(0.13, top + 0.36, f"{shown.config}.yaml{shown.more}", **style)
    axes.text(0.13, top + 0.54, f"{share:.0%} of the weights", **style)


def draw_weights(
    axes: Axes,
    theme: Theme,
    corner: tuple[float, float],
    matrices: Mapping[str, Sequence[int]],
    run: Mapping[str, Any],
    rank: int,
) -> None:
    """Draw the matrices, a line for each layer, with the parts that a rank holds and uses."""
    color = theme.series["blue"]
    left, top = corner
    for layer in range(len(matrices) // 2):
        x = left
        for kind in ("up_proj", "down_proj"):
            name = f"layers.{layer}.mlp.{kind}"
            height, width = matrices[name]
            fill(axes, (x, top), (0, 0, height, width), theme.empty)
            used = run["used"][rank].get(name)
            held = run["held"][rank].get(name)
            if used is not None:
                fill(axes, (x, top), used, color, GATHERED)
            if held is not None:
                fill(axes, (x, top), held, color)
            x += width * SCALE + GAP
        top += matrices["layers.0.mlp.up_proj"][0] * SCALE + GAP


def fill(
    axes: Axes,
    corner: tuple[float, float],
    box: Sequence[int],
    color: str,
    opacity: float = 1,
) -> None:
    """Fill a part of a matrix whose upper left corner is here."""
    left, top = corner
    first_row, first_column, last_row, last_column = box
    place = (left + first_column * SCALE, top + first_row * SCALE)
    width = (last_column - first_column) * SCALE
    height = (last_row - first_row) * SCALE
    axes.add_patch(Rectangle(place, width, height, color=color, alpha=opacity, linewidth=0))


def draw_tokens(
    axes: Axes,
    theme: Theme,
    corner: tuple[float, float],
    lengths: Sequence[int],
    spans: Mapping[str, Sequence[Sequence[int]]],
) -> None:
    """Draw the rows of a step, with the tokens that go through a rank.

    Args:
        lengths: tokens of each row.
        spans: [first, end] of the rank's parts of each row, by its number.
    """
    left, top = corner
    for row, length in enumerate(lengths):
        place = (left + TOKENS, top + row * (LINE + GAP))
        axes.add_patch(Rectangle(place, length * TOKEN, LINE, color=theme.empty, linewidth=0))
        for first, end in spans.get(str(row), ()):
            start = (place[0] + first * TOKEN, place[1])
            width = (end - first) * TOKEN
            color = theme.series["orange"]
            axes.add_patch(Rectangle(start, width, LINE, color=color, linewidth=0))
