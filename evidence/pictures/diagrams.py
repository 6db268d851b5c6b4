# SPDX-License-Identifier: Apache-2.0
"""What each GPU keeps under a strategy, and which YAML to choose."""

import json
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from .agreement import PARITY, is_plain
from .style import Theme, axes_in, bare, figure_of, to_svg

GPUS = 4
STATES = {"parameters": "blue", "gradients": "orange", "optimizer": "green"}
STATE_NAMES = {"optimizer": "optimizer state"}
# Sizes in the units of the axes
STRIDE = 5.6  # from one GPU's box to the next
BOX_WIDTH = 4.4
BOX_HEIGHT = 0.62


@dataclass(frozen=True)
class GridRow:
    """A row of the grid: strategies that keep the same on each GPU."""

    name: str
    yaml: str  # under which the share of each GPU was checked, without suffix


GRID = (
    GridRow("DDP, ZeRO-0", "ddp"),
    GridRow("ZeRO-1", "deepspeed_zero1"),
    GridRow("ZeRO-2, SHARD_GRAD_OP*", "deepspeed_zero2"),
    GridRow("ZeRO-3, FULL_SHARD", "fsdp2_full_shard"),
    GridRow("HYBRID_SHARD (2 x 2)", "fsdp2_hybrid_shard"),
)


# ---- What is split ----


def shards_by_yaml() -> dict[str, dict[str, int]]:
    """Return {YAML: {state: GPUs that share one copy of it}} of the runs on 4 ranks."""
    found = {}
    results = json.loads(PARITY.read_text())
    for row in results["rows"]:
        if is_plain(row) and row["ranks"] == GPUS:
            held = row["held"]
            found[row["config"]] = {state: held[state]["shards"] for state in STATES}
    return found


def draw_what_is_split(theme: Theme) -> str:
    """Return the grid of strategies and states, with the part that each of four GPUs keeps."""
    shards = shards_by_yaml()
    figure = figure_of(
        theme,
        4.75,
        "What each of 4 GPUs keeps: the more is split, the less memory each one needs",
        "Filled: the part that this GPU keeps. Checked in bytes on 4 CPU ranks for each strategy "
        "(results/parity.json).",
    )
    axes = axes_in(figure, left=0.13, right=0.25, top=0.75, bottom=0.5)
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.5 - len(GRID), 0.75)
    bare(axes)
    small: dict[str, Any] = {"color": theme.muted, "fontsize": 8, "va": "center"}
    for column, state in enumerate(STATES):
        left = 26.5 + 25 * column
        name = STATE_NAMES.get(state, state)
        axes.text(left + 10.6, 0.42, name, ha="center", va="center", weight="bold")
        for gpu in range(GPUS):
            center = left + STRIDE * gpu + BOX_WIDTH / 2
            axes.text(center, -0.1, f"GPU {gpu}", ha="center", **small)
        color = theme.series[STATES[state]]
        for number, row in enumerate(GRID):
            place = (left, -1 - number)
            draw_state(axes, theme, place, shards[row.yaml][state], color)
    for number, row in enumerate(GRID):
        axes.text(0, -0.57 - number, row.name, va="center", weight="bold")
        axes.text(0, -0.83 - number, f"{row.yaml}.yaml", **small)
    figure.text(
        0.015,
        0.2 / 4.75,
        "* Parameters are whole from the forward to the backward pass. FSDP's SHARD_GRAD_OP splits "
        "them outside of these, ZeRO-2 does not.",
        fontsize=8.5,
        color=theme.muted,
        va="center",
    )
    return to_svg(figure)


def draw_state(
    axes: Axes, theme: Theme, place: tuple[float, float], shards: int, color: str
) -> None:
    """Draw what each GPU keeps of one state that `shards` GPUs share, and its share in words."""
    left, bottom = place
    part = BOX_HEIGHT / shards
    for gpu in range(GPUS):
        x = left + STRIDE * gpu
        fill(axes, (x, bottom), BOX_HEIGHT, theme.empty)
        parts_from_top = gpu % shards + 1
        y = bottom + BOX_HEIGHT - part * parts_from_top
        fill(axes, (x, y), part, color)
    share = "1" if shards == 1 else f"1/{shards}"
    right = left + GPUS * STRIDE
    axes.text(right - 0.5, bottom + 0.3, share, va="center", fontsize=9)


def fill(axes: Axes, corner: tuple[float, float], height: float, color: str) -> None:
    """Fill a box or a part of it, from its lower left corner."""
    axes.add_patch(Rectangle(corner, BOX_WIDTH, height, color=color, linewidth=0))


# ---- Which YAML ----

QUESTION_LEFT = 0.0
QUESTION_RIGHT = 47.0
ANSWER_LEFT = 57.0
ANSWER_RIGHT = 100.0


@dataclass(frozen=True)
class Question:
    """A question of the decision tree; one answer names a YAML, the other leads to the next."""

    text: str
    answer: str  # that leads to the YAML: yes or no
    yaml: str
    effect: str


QUESTIONS = (
    Question("Do you have one GPU only?", "yes", "single", "one process"),
    Question(
        "Do the model, its gradients and the\noptimizer state fit on each GPU?",
        "yes",
        "ddp",
        "nothing is split",
    ),
    Question(
        "Do they fit when they are split\nacross all GPUs?",
        "no",
        "fsdp2_cpu_offload",
        "split across all GPUs, and kept on the host",
    ),
    Question(
        "Are there several nodes with slow links,\nand does one node hold all of it?",
        "yes",
        "fsdp2_hybrid_shard",
        "split within a node, replicated across nodes",
    ),
)
LAST = Question("", "", "fsdp", "parameters, gradients and optimizer state are split")
OPPOSITE = {"yes": "no", "no": "yes"}


def draw_which_yaml(theme: Theme) -> str:
    """Return the decision tree from the GPUs at hand to a YAML."""
    figure = figure_of(
        theme,
        5.2,
        "Which YAML? Split only as much as the memory of your GPUs demands",
        "python scripts/plan_memory.py shows what fits. With LoRA count only the adapters' "
        "gradients and optimizer state.",
    )
    axes = axes_in(figure, left=0.15, right=0.15, top=0.7, bottom=0.5)
    axes.set_xlim(-0.5, 100.5)
    axes.set_ylim(-4.45, 0.45)
    bare(axes)
    for number, question in enumerate(QUESTIONS):
        draw_question(axes, theme, -number, question)
    draw_answer(axes, theme, -len(QUESTIONS), LAST, QUESTION_LEFT, QUESTION_RIGHT)
    figure.text(
        0.015,
        0.27 / 5.2,
        "DeepSpeed's counterparts: deepspeed_zero0.yaml for ddp.yaml, deepspeed_zero3.yaml for "
        "fsdp.yaml,\nand deepspeed_zero3_offload.yaml for fsdp2_cpu_offload.yaml.",
        fontsize=8.5,
        color=theme.muted,
        va="center",
    )
    return to_svg(figure)


def draw_question(axes: Axes, theme: Theme, y: float, question: Question) -> None:
    """Draw a question, the YAML to its right, and the arrows that leave it."""
    draw_box(axes, (QUESTION_LEFT, QUESTION_RIGHT), y, theme.empty, theme.muted)
    center = (QUESTION_LEFT + QUESTION_RIGHT) / 2
    axes.text(center, y, question.text, ha="center", va="center", linespacing=1.3)
    draw_answer(axes, theme, y, question, ANSWER_LEFT, ANSWER_RIGHT)
    half = BOX_HEIGHT / 2
    draw_arrow(axes, theme, (QUESTION_RIGHT, y), (ANSWER_LEFT, y))
    next_top = y - 1 + half
    draw_arrow(axes, theme, (center, y - half), (center, next_top))
    middle = (QUESTION_RIGHT + ANSWER_LEFT) / 2
    bold: dict[str, Any] = {"weight": "bold"}
    axes.text(middle, y + 0.04, question.answer, ha="center", va="bottom", **bold)
    opposite = OPPOSITE[question.answer]
    axes.text(center + 1.2, y - 0.5, opposite, va="center", **bold)


def draw_answer(
    axes: Axes, theme: Theme, y: float, question: Question, left: float, right: float
) -> None:
    """Draw a YAML with what it does."""
    color = theme.series["blue"]
    draw_box(axes, (left, right), y, theme.background, color)
    name = f"{question.yaml}.yaml"
    axes.text(left + 2, y + 0.13, name, va="center", weight="bold", color=color)
    axes.text(left + 2, y - 0.13, question.effect, va="center", fontsize=8.5)


def draw_box(axes: Axes, sides: tuple[float, float], y: float, color: str, edge: str) -> None:
    """Draw a box between two sides, its middle at y."""
    left, right = sides
    corner = (left, y - BOX_HEIGHT / 2)
    width = right - left
    box = Rectangle(corner, width, BOX_HEIGHT, facecolor=color, edgecolor=edge)
    axes.add_patch(box)


def draw_arrow(
    axes: Axes, theme: Theme, start: tuple[float, float], end: tuple[float, float]
) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "->", "color": theme.muted, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
