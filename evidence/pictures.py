# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of README.md and docs/ as SVG, each of them for light and dark pages.

    python evidence/pictures.py           # all, into docs/pictures/
    python evidence/pictures.py memory    # one of them

The numbers of `memory` come from the planner. The text of `quickstart_terminal` is
results/quickstart.txt, which `make quickstart > results/quickstart.txt 2>&1` writes. Drawn again
from the same numbers, a file is the same byte for byte.
"""

import io
import re
import sys
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

import rooms  # noqa: F401  before what it makes importable
from jobs import LLAMA_3_1_8B
from paths import ROOT

FOLDER = ROOT / "docs" / "pictures"

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


# ---- The memory of each YAML ----

CARD = "h100"
GPUS = 4  # what the mesh of fsdp2_hybrid_shard.yaml needs
NOT_DRAWN = ("fsdp2_full_shard", "pp", "ep", "fsdp2_ep")  # as fsdp; of other recipes
LENGTH = 4096  # tokens of a sequence
FLAGS = f"--eval_strategy no --max_length {LENGTH} --per_device_train_batch_size 1".split()
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
    figure = Figure(figsize=(WIDTH, MEMORY_HEIGHT))
    title = f"Llama-3.1-8B on {GPUS} GPUs of 80 GB: {number} of {len(peaks)} YAMLs fit"
    figure.text(0.015, 1 - 0.12 / MEMORY_HEIGHT, title, fontsize=13, weight="bold", va="top")
    setting = (
        "Peak memory per GPU, planned, not yet measured on several GPUs. Full fine-tuning, AdamW,\n"
        f"bf16 mixed precision, activation checkpointing, 1 sequence of {LENGTH:,} tokens per GPU; "
        "single.yaml uses one GPU;\nfsdp1_hybrid_shard.yaml needs several nodes and is left out; "
        "fsdp2_full_shard.yaml equals fsdp.yaml."
    )
    small: dict[str, Any] = {"fontsize": 9, "color": LIGHT["muted"], "linespacing": 1.4}
    figure.text(0.015, 1 - 0.39 / MEMORY_HEIGHT, setting, va="top", **small)
    # Margins in inches: 2.3 on the left for names, 1.5 on the right, 1.4 above, 0.5 below
    inner = ((WIDTH - 3.8) / WIDTH, (MEMORY_HEIGHT - 1.9) / MEMORY_HEIGHT)
    axes = figure.add_axes((2.3 / WIDTH, 0.5 / MEMORY_HEIGHT, *inner))
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
    from paths import CONFIGS
    from planner.answer import held_by
    from planner.engines import Profiles
    from planner.plan import CARDS, GIB, logits_mib_on, plan_of

    part_of = {category: part for part, (_, held) in PARTS.items() for category in held}
    peaks = {}
    profiles = Profiles()
    with TemporaryDirectory() as model:
        AutoConfig.for_model(**LLAMA_3_1_8B).save_pretrained(model)
        words = [*FLAGS, "--gradient_checkpointing", "--model_name_or_path", model]
        words += ["--max_logits_mib", str(logits_mib_on(CARDS[CARD] * GIB))]
        args = parse(llama.Arguments, words=words)
        for path in sorted(CONFIGS.glob("*.yaml")):
            config = read(path)
            strategy = strategy_of(config)
            if path.stem in NOT_DRAWN or strategy.ranks_per_row > 1 or strategy.groups_are_machines:
                continue
            ranks = 1 if path.stem == "single" else GPUS
            held = held_by(plan_of(args, config, ranks, 1, "bf16"), profiles)
            peaks[path.stem] = dict.fromkeys(PARTS, 0.0)
            for category, size in held.device.items():
                peaks[path.stem][part_of[category]] += size / GIB
    return peaks


# ---- The terminal of the quick start ----

ROW_LENGTH = 100  # characters; longer lines end with an ellipsis
ROW_HEIGHT = 0.2  # inches
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
    height = ROW_HEIGHT * (len(lines) + 1)
    figure = Figure(figsize=(WIDTH, height), facecolor=LIGHT["empty"])
    for number, line in enumerate(lines, start=1):
        color = "text"
        if line.startswith(("$ ", SECTION)):
            color = "blue"
        elif line == CUT:
            color = "muted"
        if len(line) > ROW_LENGTH:
            line = line[: ROW_LENGTH - 3] + "..."
        shown = line.replace(" ", "\xa0")  # SVG folds spaces
        place = (0.02, 1 - ROW_HEIGHT * number / height)
        style: dict[str, Any] = {"family": "monospace", "fontsize": 10, "color": LIGHT[color]}
        figure.text(*place, shown, parse_math=False, **style)
    return to_svg(figure)


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


# ---- All of them ----

PICTURES: dict[str, Callable[[], str]] = {
    "memory": draw_memory,
    "quickstart_terminal": draw_quickstart_terminal,
}


def draw(name: str) -> str:
    """Return a picture as the text of an SVG."""
    with matplotlib.rc_context(SETTINGS):
        return with_dark_colors(PICTURES[name]())


def main() -> None:
    """Draw the pictures that the words of the command name, or all."""
    for name in sys.argv[1:] or PICTURES:
        path = FOLDER / f"{name}.svg"
        path.write_text(draw(name), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
