# SPDX-License-Identifier: Apache-2.0
"""What each GPU keeps under a strategy, and which YAML to choose."""

import json
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from paths import ROOT

from .style import Theme, axes_in, bare, figure_of, to_svg

PARITY = ROOT / "results" / "parity.json"
GPUS = 4
STATES = {"parameters": "blue", "gradients": "orange", "optimizer": "green"}
STATE_NAMES = {"optimizer": "optimizer state"}


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
    for row in json.loads(PARITY.read_text())["rows"]:
        is_plain = row["recipe"] == "llama" and row["weights"] == "full" and not row["flags"]
        if row["group"] == "strategies" and row["ranks"] == GPUS and is_plain:
            found[row["config"]] = {state: row["held"][state]["shards"] for state in STATES}
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
    for column, state in enumerate(STATES):
        left = 26.5 + 25 * column
        name = STATE_NAMES.get(state, state)
        axes.text(left + 10.6, 0.42, name, ha="center", va="center", weight="bold")
        for gpu in range(GPUS):
            center = left + 5.6 * gpu + 2.2
            style: dict[str, Any] = {"color": theme.muted, "fontsize": 8}
            axes.text(center, -0.1, f"GPU {gpu}", ha="center", va="center", **style)
        for number, row in enumerate(GRID):
            place = (left, -1 - number)
            draw_state(axes, theme, place, shards[row.yaml][state], theme.series[STATES[state]])
    for number, row in enumerate(GRID):
        axes.text(0, -0.57 - number, row.name, va="center", weight="bold")
        axes.text(0, -0.83 - number, f"{row.yaml}.yaml", va="center", fontsize=8, color=theme.muted)
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
    part = 0.62 / shards
    for gpu in range(GPUS):
        x = left + 5.6 * gpu
        axes.add_patch(Rectangle((x, bottom), 4.4, 0.62, color=theme.empty, linewidth=0))
        y = bottom + 0.62 - part * (gpu % shards + 1)
        axes.add_patch(Rectangle((x, y), 4.4, part, color=color, linewidth=0))
    share = "1" if shards == 1 else f"1/{shards}"
    axes.text(left + 4 * 5.6 - 0.5, bottom + 0.3, share, va="center", fontsize=9)


# ---- Which YAML ----

QUESTION_LEFT, QUESTION_RIGHT = 0.0, 47.0
ANSWER_LEFT, ANSWER_RIGHT = 57.0, 100.0
BOX_HEIGHT = 0.62


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
        "python scripts/plan_memory.py tells what fits. With LoRA count only the adapters' "
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
    draw_arrow(axes, theme, (center, y - half), (center, y - 1 + half))
    middle = (QUESTION_RIGHT + ANSWER_LEFT) / 2
    axes.text(middle, y + 0.04, question.answer, ha="center", va="bottom", weight="bold")
    axes.text(center + 1.2, y - 0.5, OPPOSITE[question.answer], va="center", weight="bold")


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
    box = Rectangle(corner, right - left, BOX_HEIGHT, facecolor=color, edgecolor=edge)
    axes.add_patch(box)


def draw_arrow(
    axes: Axes, theme: Theme, start: tuple[float, float], end: tuple[float, float]
) -> None:
    """Draw an arrow between two points."""
    style = {"arrowstyle": "->", "color": theme.muted, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
