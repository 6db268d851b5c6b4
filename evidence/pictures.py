# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of README.md and docs/ as SVG, each of them for light and dark pages.

    python evidence/pictures.py                   # all of them, into docs/pictures/
    python evidence/pictures.py memory parity     # some of them

The numbers of `memory` come from the planner, those of `parity` and `what_is_split` from results/,
the names of `house` from recipes/. The text of `quickstart_terminal` is
results/quickstart.txt, which `make quickstart OUT=runs/quickstart > results/quickstart.txt 2>&1`
writes. Drawn again from the same numbers, a file is the same byte for byte.
"""

import io
import re
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import rooms  # noqa: F401  before what it makes importable
from common import Parser, run_command
from paths import ROOT
from tables import compared_runs, place_of

FOLDER = ROOT / "docs" / "pictures"

# ---- Colors and files ----

# {name: its color on a light page, and on a dark one}. Those with names of colors are Okabe and
# Ito's, which color-blind readers can tell apart; on a dark page some are lighter.
COLORS = {
    "background": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),  # what is less important than text
    "grid": ("#d1d9e0", "#30363d"),
    "empty": ("#eef1f4", "#21262d"),  # the background of a box
    "blue": ("#0072b2", "#3b9ddd"),
    "orange": ("#e69f00", "#e69f00"),
    "green": ("#009e73", "#14b88a"),
    "red": ("#c2410c", "#f0743e"),
    "purple": ("#a3578a", "#cc79a7"),
    "sky": ("#56b4e9", "#8fd0f5"),
    "gray": ("#8c959f", "#7d8590"),
}
LIGHT = {name: light for name, (light, _) in COLORS.items()}
WIDTH = 8.6  # inches; about the width of a README, so that text keeps its size there
SETTINGS = {
    "svg.fonttype": "none",  # text as text: it can be searched, and files stay small
    "svg.hashsalt": "pictures",  # the same ids in each drawing
    "font.family": "sans-serif",
    # Verdana has nearly the widths of DejaVu Sans, and most machines have it.
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
    "font.size": 10.0,  # points
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "grid.color": LIGHT["grid"],
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), LIGHT["muted"]),
    **dict.fromkeys(("axes.labelcolor", "text.color"), LIGHT["text"]),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), LIGHT["text"]),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor"), LIGHT["background"]),
}
STYLE_OF_NOTE: dict[str, Any] = {"color": LIGHT["muted"], "fontsize": 8.5, "va": "center"}
SMALL: dict[str, Any] = {"color": LIGHT["muted"], "fontsize": 8, "va": "center"}


def with_dark_colors(svg: str) -> str:
    """Return an SVG in light colors with a style sheet that changes them on a dark page.

    The colors are in `style` attributes, which an important rule of a style sheet precedes.
    """
    rules = []
    for light, dark in COLORS.values():
        for name in ("fill", "stroke"):
            if light != dark and f"{name}: {light}" in svg:
                rules.append(f'[style*="{name}: {light}"] {{ {name}: {dark} !important }}')
    sheet = "\n".join(["<style>", "@media (prefers-color-scheme: dark) {", *rules, "}", "</style>"])
    return re.sub(r"<svg[^>]*>", lambda found: f"{found[0]}\n{sheet}", svg, count=1)


def to_svg(figure: Figure) -> str:
    """Return a figure as an SVG without a date, so that it is equal when it is drawn again."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    return "\n".join(lines) + "\n"


def figure_of(height: float, title: str, subtitle: str) -> Figure:
    """Return a figure, of a height in inches, with its point as a title and the setting below."""
    figure = Figure(figsize=(WIDTH, height))
    top = 1 - 0.12 / height
    below = top - 0.27 / height
    figure.text(0.015, top, title, fontsize=13, weight="bold", va="top")
    style: dict[str, Any] = {"fontsize": 9, "color": LIGHT["muted"], "linespacing": 1.4}
    figure.text(0.015, below, subtitle, va="top", **style)
    return figure


def axes_in(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Return axes with these margins in inches."""
    width, height = figure.get_size_inches()
    inner_width = width - left - right
    inner_height = height - top - bottom
    corner = (left / width, bottom / height)
    return figure.add_axes((*corner, inner_width / width, inner_height / height))


# ---- The memory of each YAML ----

CARD = "h100"
GPUS = 4  # what the mesh of fsdp2_hybrid_shard.yaml needs
LENGTH = 4096  # tokens of a sequence
FLAGS = f"--eval_strategy no --max_length {LENGTH} --per_device_train_batch_size 1".split()
LLAMA_8B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
# What the planner tells apart, in five parts that a reader knows, with their colors
PARTS = {
    "parameters": ("blue", ("parameters", "quantization", "unsharded")),
    "gradients": ("orange", ("gradients",)),
    "optimizer state": ("purple", ("optimizer", "master copies")),
    "activations and buffers": ("sky", ("activations", "communication")),
    "CUDA context etc. (assumed)": ("gray", ("constants",)),
}
MEMORY_HEIGHT = 6.4  # inches


def draw_memory() -> str:
    """Return the bars of all YAMLs, split into PARTS, the smallest peak first."""
    from planner.plan import CARDS

    card = CARDS[CARD]
    peaks = planned_peaks()
    sizes = {name: sum(peak.values()) for name, peak in peaks.items()}
    order = sorted(sizes, key=lambda name: (sizes[name], name), reverse=True)
    number = len([size for size in sizes.values() if size <= card])
    figure = figure_of(
        MEMORY_HEIGHT,
        f"Llama-3.1-8B on {GPUS} GPUs of 80 GB: {number} of {len(peaks)} YAMLs fit",
        "Peak memory per GPU, planned, not yet measured on several GPUs. Full fine-tuning, AdamW,\n"
        f"bf16 mixed precision, activation checkpointing, 1 sequence of {LENGTH:,} tokens per GPU; "
        "single.yaml uses one GPU;\nfsdp1_hybrid_shard.yaml needs several nodes and is left out; "
        "fsdp2_full_shard.yaml equals fsdp.yaml.",
    )
    axes = axes_in(figure, left=2.3, right=1.5, top=1.4, bottom=0.5)
    left = [0.0] * len(order)
    for part, (color, _) in PARTS.items():
        widths = [peaks[name][part] for name in order]
        axes.barh(order, widths, 0.7, left, color=LIGHT[color], label=part)
        left = list(map(sum, zip(left, widths, strict=True)))
    axes.set_xlabel("peak memory per GPU (GiB)")
    axes.set_yticks(range(len(order)), [f"{name}.yaml" for name in order])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.grid(axis="x")
    # The line of the card passes behind the words.
    box = {"facecolor": LIGHT["background"], "linewidth": 0, "pad": 1.5}
    for place, name in enumerate(order):
        size = sizes[name]
        color, words = ("green", "fits") if size <= card else ("red", "does not fit")
        style: dict[str, Any] = {"color": LIGHT[color], "va": "center", "zorder": 4, "bbox": box}
        axes.text(size + 1.5, place, f"{size:.0f} GiB, {words}", **style)
    axes.axvline(card, color=LIGHT["text"], linestyle="--", linewidth=1.3)
    words = f"H100 80GB: {card:.1f} GiB"
    axes.text(card, len(order) - 0.35, words, ha="center", va="bottom", fontsize=9)
    place_of_legend: dict[str, Any] = {"loc": "upper left", "ncols": 5, "columnspacing": 1.2}
    below_subtitle = (0.01, 1 - 0.9 / MEMORY_HEIGHT)
    figure.legend(bbox_to_anchor=below_subtitle, fontsize=8.5, **place_of_legend)
    return to_svg(figure)


def planned_peaks() -> dict[str, dict[str, float]]:
    """Return the GiB of each of PARTS, by the name of each YAML that makes sense on these GPUs.

    Raises KeyError if the planner has a category that PARTS does not have.
    """
    # Imported here, since it takes seconds and no other picture needs it.
    from tempfile import TemporaryDirectory

    from transformers import AutoConfig

    import llama
    from config_strategy import read, strategy_of
    from core.cli import parse
    from paths import CONFIGS, OF_EXPERTS, OF_PIPELINES, SAME_AS_FIRST_CHOICE
    from planner.engines import Profiles
    from planner.plan import CARDS, GIB, Batch, logits_mib_on, plan_of, with_constants

    part_of = {category: part for part, (_, held) in PARTS.items() for category in held}
    peaks = {}
    profiles = Profiles()
    with TemporaryDirectory() as model:
        AutoConfig.for_model("llama", **LLAMA_8B).save_pretrained(model)
        words = [*FLAGS, "--gradient_checkpointing", "--model_name_or_path", model]
        words += ["--max_logits_mib", str(logits_mib_on(CARDS[CARD] * GIB))]
        args = parse(llama.Arguments, words=words)
        for path in sorted(set(CONFIGS.glob("*.yaml")) - {SAME_AS_FIRST_CHOICE, OF_PIPELINES}):
            config = read(path)
            strategy = strategy_of(config)
            if path in OF_EXPERTS or strategy.ranks_per_row > 1 or strategy.groups_are_machines:
                continue
            ranks = 1 if path.stem == "single" else GPUS
            held = profiles.held(plan_of(args, config, ranks, 1, "bf16"), Batch(1, LENGTH, LENGTH))
            peaks[path.stem] = dict.fromkeys(PARTS, 0.0)
            for category, size in with_constants(held.device, ranks).items():
                peaks[path.stem][part_of[category]] += size / GIB
    return peaks


# ---- Equal losses ----

# {kind of weights: the color of its dots, and how far they are from the middle of their line}
WEIGHTS = {
    "full": ("blue", 0.24),
    "LoRA": ("orange", 0.08),
    "int8 LoRA": ("green", -0.08),
    "nf4 LoRA": ("purple", -0.24),
}


def draw_parity() -> str:
    """Return a line for each YAML with a dot for each run in fp32: how far its loss is off."""
    runs = [run for run in compared_runs() if run["precision"] == "no"]
    ordered = sorted(runs, key=place_of, reverse=True)
    configs = list(dict.fromkeys(run["config"] for run in ordered))
    largest = max(run["differences"]["loss"] for run in runs)
    bound = max(run["bounds"]["loss"] for run in runs)
    recipes = {run["recipe"] for run in runs}
    height = 1.95 + 0.22 * len(configs)
    figure = figure_of(
        height,
        f"{len(runs)} runs, one loss: none is further than {largest:.1e} from one process",
        f"Largest relative difference of the loss in 20 steps of the same job: {len(recipes)} "
        "recipes with tiny models, fp32, 1 to 8 CPU ranks.\nA dot is a run: its ranks, batches, "
        "flags or mesh differ from those of others. Not yet measured in bf16 on several GPUs.",
    )
    axes = axes_in(figure, left=2.3, right=0.6, top=1.35, bottom=0.55)
    for weights, (color, offset) in WEIGHTS.items():
        of_kind = [run for run in runs if run["weights"] == weights]
        x = [run["differences"]["loss"] for run in of_kind]
        y = [configs.index(run["config"]) + offset for run in of_kind]
        style: dict[str, Any] = {"color": LIGHT[color], "alpha": 0.75, "linewidth": 0}
        axes.scatter(x, y, 14, label=weights, **style)
    axes.axvline(bound, linestyle="--", linewidth=1.3, color=LIGHT["red"])
    top = len(configs) - 0.4
    words = f"bound: {bound:.0e}"
    axes.text(bound, top, words, ha="center", va="bottom", color=LIGHT["red"])
    axes.set_xlim(left=0)
    axes.set_ylim(-0.6, top)
    axes.set_yticks(range(len(configs)), [f"{config}.yaml" for config in configs], fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("largest relative difference of the loss")
    axes.ticklabel_format(axis="x", style="sci", scilimits=(0, 0), useMathText=True)
    axes.grid(axis="x")
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.255, 1 - 0.9 / height)}
    figure.legend(ncols=4, fontsize=8.5, handletextpad=0.1, columnspacing=1.2, **place)
    return to_svg(figure)


# ---- What is split ----

STATES = {"parameters": "blue", "gradients": "orange", "optimizer": "green"}
# {strategies that keep the same on each GPU: the YAML under which the shares were checked}
GRID = {
    "DDP, ZeRO-0": "ddp",
    "ZeRO-1": "deepspeed_zero1",
    "ZeRO-2, SHARD_GRAD_OP*": "deepspeed_zero2",
    "ZeRO-3, FULL_SHARD": "fsdp2_full_shard",
    "HYBRID_SHARD (2 x 2)": "fsdp2_hybrid_shard",
}
# Sizes in the units of the axes
STRIDE = 5.6  # from one GPU's box to the next
BOX_WIDTH = 4.4
BOX_HEIGHT = 0.62


def draw_what_is_split() -> str:
    """Return the grid of strategies and states, with the part that each of four GPUs keeps."""
    held = {}
    for run in compared_runs():
        is_plain = run["group"] == "strategies" and run["weights"] == "full" and not run["flags"]
        if is_plain and run["ranks"] == GPUS:
            held[run["config"]] = run["held"]
    figure = figure_of(
        4.75,
        "What each of 4 GPUs keeps: the more is split, the less memory each one needs",
        "Filled: the part that this GPU keeps. Checked in bytes on 4 CPU ranks for each strategy "
        "(results/parity.json).",
    )
    axes = axes_in(figure, left=0.13, right=0.25, top=0.75, bottom=0.5)
    axes.set_xlim(0, 100)
    axes.set_ylim(-0.5 - len(GRID), 0.75)
    axes.set_axis_off()
    for column, (state, color) in enumerate(STATES.items()):
        left = 26.5 + 25 * column
        name = "optimizer state" if state == "optimizer" else state
        axes.text(left + 10.6, 0.42, name, ha="center", va="center", weight="bold")
        for gpu in range(GPUS):
            axes.text(left + STRIDE * gpu + BOX_WIDTH / 2, -0.1, f"GPU {gpu}", ha="center", **SMALL)
        for number, config in enumerate(GRID.values()):
            shards = held[config][state]["shards"]
            draw_state(axes, (left, -1 - number), shards, LIGHT[color])
    for number, (name, config) in enumerate(GRID.items()):
        axes.text(0, -0.57 - number, name, va="center", weight="bold")
        axes.text(0, -0.83 - number, f"{config}.yaml", **SMALL)
    note = (
        "* Parameters are whole from the forward to the backward pass. FSDP's SHARD_GRAD_OP splits "
        "them outside of these, ZeRO-2 does not."
    )
    figure.text(0.015, 0.25 / 4.75, note, **STYLE_OF_NOTE)
    return to_svg(figure)


def draw_state(axes: Axes, corner: tuple[float, float], shards: int, color: str) -> None:
    """Draw what each GPU keeps of one state that `shards` GPUs share, and its share in words."""
    left, bottom = corner
    part = BOX_HEIGHT / shards
    for gpu in range(GPUS):
        x = left + STRIDE * gpu
        y = bottom + BOX_HEIGHT - part * (gpu % shards + 1)
        axes.add_patch(Rectangle((x, bottom), BOX_WIDTH, BOX_HEIGHT, color=LIGHT["empty"], lw=0))
        axes.add_patch(Rectangle((x, y), BOX_WIDTH, part, color=color, lw=0))
    share = "1" if shards == 1 else f"1/{shards}"
    axes.text(left + GPUS * STRIDE - 0.5, bottom + 0.3, share, va="center", fontsize=9)


# ---- The house ----

ROOM_ROWS = {  # {what stands in a row, from above: (its files or folders, its color)}
    "recipes: one task each, the loop in sight": ("recipes/*.py", "blue"),
    "tasks: what one task needs": ("recipes/tasks/*.py", "green"),
    "extras: a folder for each feature that most runs do not need": ("recipes/extras/*/", "orange"),
    "core, first half: edit these": ("recipes/core/*.py", "sky"),
    "core, second half: trust these": ("recipes/core/*.py", "purple"),
}
ROOMS_A_LINE = 8
MODULE_IN_TABLE = re.compile(r"`(\w+)\.py`")


def draw_house() -> str:
    """Return the modules of recipes/ from above: each row imports only rows below its own."""
    halves = (ROOT / "recipes" / "core" / "README.md").read_text().split("| trust |")
    of_core = [MODULE_IN_TABLE.findall(half.partition("## ")[0]) for half in halves]
    names = []
    for pattern, _ in ROOM_ROWS.values():
        found = sorted(path.stem for path in ROOT.glob(pattern))
        names.append([name for name in found if not name.startswith("_")])
    names[-2:] = [[name for name in half if name in names[-1]] for half in of_core]
    lines = sum(-(-len(row) // ROOMS_A_LINE) for row in names)
    height = 0.9 + 0.42 * lines + 0.5 * len(names)
    title = "Imports lead down"
    figure = figure_of(
        height, title, "A row imports what is below it; the core calls extras by hooks"
    )
    axes = axes_in(figure, 0.15, 0.15, 0.75, 0.1)
    axes.set_axis_off()
    y = 0.0
    for (what, (_, color)), row in zip(ROOM_ROWS.items(), names, strict=True):
        axes.text(0, y, what, va="center", fontsize=9, weight="bold")
        for number, name in enumerate(row):
            column = number % ROOMS_A_LINE
            y -= 0.42 * (column == 0) + 0.08 * (number == 0)
            edge = {"facecolor": LIGHT["empty"], "edgecolor": LIGHT[color]}
            axes.add_patch(Rectangle((column, y - 0.17), 0.95, 0.34, **edge))
            axes.text(column + 0.475, y, name, ha="center", va="center", fontsize=7.5)
        y -= 0.42
    axes.set_xlim(0, ROOMS_A_LINE)
    axes.set_ylim(y + 0.2, 0.2)
    return to_svg(figure)


# ---- The terminal of the quick start ----

ROW_LENGTH = 100  # characters; longer lines end with an ellipsis
ROW_HEIGHT = 17.0  # pixels, as all sizes here
CHARACTER = 7.25  # the width of a character of FONT at 12 pixels
FONT = "'DejaVu Sans Mono', Menlo, Consolas, 'Liberation Mono', monospace"
MARGIN = 16.0
BAR = 30.0  # the height of the title bar
MOST_LINES = 12  # lines shown of each section
SECTION = "== "
CUT = "[...]"
ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")  # colors and movements of a terminal's cursor


def draw_quickstart_terminal() -> str:
    """Return the terminal, with the first and the last lines of each section of the output."""
    output = (ROOT / "results" / "quickstart.txt").read_text()
    lines = ["$ make quickstart"]
    for section in sections_of(output):
        if len(section) > MOST_LINES:
            half = MOST_LINES // 2
            section = [*section[:half], CUT, *section[-half:]]
        lines += section
    width = 2 * MARGIN + ROW_LENGTH * CHARACTER
    height = BAR + 2 * MARGIN + ROW_HEIGHT * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" '
        f'width="{width:g}" height="{height:g}" role="img">',
        "<title>The output of make quickstart</title>",
        f'<rect width="{width:g}" height="{height:g}" rx="8" style="fill: {LIGHT["empty"]}"/>',
    ]
    for number, color in enumerate(("red", "orange", "green")):
        x = MARGIN + 18 * number
        parts.append(f'<circle cx="{x:g}" cy="17" r="5.5" style="fill: {LIGHT[color]}"/>')
    parts.append(f'<g font-family="{FONT}" font-size="12">')
    for number, line in enumerate(lines):
        y = BAR + MARGIN + ROW_HEIGHT * (number + 0.75)
        parts.append(text_element(line, y))
    parts += ["</g>", "</svg>"]
    return "\n".join(parts) + "\n"


def sections_of(output: str) -> list[list[str]]:
    """Return the output cut before each heading, without its empty lines and make's own.

    Of a progress bar its last state is left, whether or not a terminal's line was overwritten.
    """
    sections: list[list[str]] = [[]]
    bar = None
    for line in ESCAPES.sub("", output).split("\n"):
        shown = line.rstrip("\r").rpartition("\r")[2].rstrip()
        if not shown or shown.startswith("make"):
            continue
        if shown.startswith(SECTION):
            sections.append([])
        bar_before = bar
        bar = re.match(r"(.+?): +\d+%\|", shown)
        if bar and bar_before and bar[1] == bar_before[1]:
            sections[-1].pop()
        sections[-1].append(shown)
    return sections


def text_element(line: str, y: float) -> str:
    """Return one line of the terminal."""
    color = "text"
    if line.startswith("$ "):
        color = "green"
    elif line.startswith(SECTION):
        color = "blue"
    elif line == CUT:
        color = "muted"
    weight = "bold" if color in ("green", "blue") else "normal"
    if len(line) > ROW_LENGTH:
        line = line[: ROW_LENGTH - 3] + "..."
    style = f"fill: {LIGHT[color]}; font-weight: {weight}; white-space: pre"
    return f'<text x="{MARGIN:g}" y="{y:g}" style="{style}">{escape(line)}</text>'


# ---- All of them ----

PICTURES: dict[str, Callable[[], str]] = {
    "memory": draw_memory,
    "parity": draw_parity,
    "what_is_split": draw_what_is_split,
    "house": draw_house,
    "quickstart_terminal": draw_quickstart_terminal,
}


def draw(name: str) -> str:
    """Return a picture as the text of an SVG."""
    with matplotlib.rc_context(SETTINGS):
        return with_dark_colors(PICTURES[name]())


def main() -> None:
    """Draw the chosen pictures."""
    parser = Parser(description="Draw the pictures of README.md and docs/ as SVG.")
    words = f"{', '.join(PICTURES)} (default: all)"
    parser.add_argument("names", nargs="*", metavar="NAME", help=words)
    args = parser.parse_args()
    for name in args.names or PICTURES:
        if name not in PICTURES:
            parser.error(f"{name}: no such picture; choose from {', '.join(PICTURES)}")
        path = FOLDER / f"{name}.svg"
        path.write_text(draw(name), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    run_command(main)
