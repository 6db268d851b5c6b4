# SPDX-License-Identifier: Apache-2.0
"""The planned peak memory of Llama-3.1-8B on each GPU, under every YAML, against a card."""

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes

from planner.cards import GIB, bytes_of_known, with_constants

from .style import Theme, axes_in, figure_of, to_svg

CARD = "h100"
CARD_NAME = "H100 80GB"
GPUS = 4  # what the mesh of fsdp2_hybrid_shard.yaml needs
LENGTH = 4096  # tokens of a sequence
FLAGS = f"--max_length {LENGTH} --per_device_train_batch_size 1 --gradient_checkpointing".split()
# What the planner tells apart, in five parts that a reader knows
PARTS = {
    "parameters": ("parameters", "unsharded", "working copies"),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer", "master copies"),
    "activations and buffers": ("activations", "logits", "communication"),
    "CUDA context etc. (assumed)": ("constants",),
}
HEIGHT = 6.4  # inches
COLORS = ("blue", "orange", "purple", "sky", "gray")

Peak = Mapping[str, float]  # GiB by the keys of PARTS


def draw_memory(theme: Theme) -> str:
    """Return the bars of all YAMLs, the smallest peak first."""
    card = bytes_of_known(CARD) / GIB
    peaks = planned_peaks()
    sizes = {name: sum(peak.values()) for name, peak in peaks.items()}
    order = sorted(sizes, key=lambda name: (sizes[name], name), reverse=True)
    number = len([peak for peak in peaks.values() if fits(peak, card)])
    figure = figure_of(
        theme,
        HEIGHT,
        f"Llama-3.1-8B on {GPUS} GPUs of 80 GB: {number} of {len(peaks)} YAMLs fit",
        "Peak memory per GPU, planned, not yet measured on several GPUs. Full fine-tuning, AdamW,\n"
        f"bf16 mixed precision, activation checkpointing, 1 sequence of {LENGTH:,} tokens per GPU; "
        "single.yaml uses one GPU;\nfsdp1_hybrid_shard.yaml needs several nodes and is left out; "
        "fsdp2_full_shard.yaml equals fsdp.yaml.",
    )
    axes = axes_in(figure, left=2.3, right=1.5, top=1.4, bottom=0.5)
    draw_bars(axes, theme, peaks, order)
    label_bars(axes, theme, [peaks[name] for name in order], card)
    style: dict[str, Any] = {"color": theme.text, "linestyle": "--", "linewidth": 1.3}
    axes.axvline(card, **style)
    top = len(order) - 0.35
    words = f"{CARD_NAME}: {card:.1f} GiB"
    axes.text(card, top, words, ha="center", va="bottom", fontsize=9)
    handles, names = axes.get_legend_handles_labels()
    below_subtitle = 1 - 0.9 / HEIGHT
    place: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (0.01, below_subtitle)}
    figure.legend(handles, names, ncols=5, fontsize=8.5, columnspacing=1.2, **place)
    return to_svg(figure)


def planned_peaks() -> dict[str, Peak]:
    """Return the peak of each YAML that makes sense on these GPUs, by the YAML's name."""
    # Imported here, since it takes seconds and no other picture needs it.
    from transformers import AutoConfig

    from measured.validation import SHAPES, training_arguments
    from planner import recipe, yaml_files
    from planner.closed_form import closed_form
    from planner.plan import plan_of
    from planner.request import Batch

    args = training_arguments(FLAGS)
    logits_mib = recipe.logits_mib_on(bytes_of_known(CARD))
    args = recipe.with_values(args, max_logits_mib=logits_mib)
    model = AutoConfig.for_model("llama", **SHAPES["8B"])
    batch = Batch(1, LENGTH, LENGTH)
    peaks = {}
    for path in yaml_files.shipped_files():
        config = yaml_files.read(path)
        ranks = 1 if path.stem == "single" else GPUS
        if yaml_files.makes_sense_on(config, ranks, 1):
            plan = plan_of(args, config, ranks, 1, "bf16")
            device, _ = closed_form(plan, model, batch)
            peaks[path.stem] = peak_of(with_constants(device, ranks))
    return peaks


def peak_of(device: Mapping[str, int]) -> Peak:
    """Return the GiB of each part. Raises KeyError if the planner has more parts than PARTS."""
    part_of = {}
    for part, categories in PARTS.items():
        part_of |= dict.fromkeys(categories, part)
    peak = dict.fromkeys(PARTS, 0.0)
    for category, size in device.items():
        if size:
            peak[part_of[category]] += size / GIB
    return peak


def fits(peak: Peak, card: float) -> bool:
    """Whether a card with `card` GiB is enough."""
    return sum(peak.values()) <= card


def draw_bars(axes: Axes, theme: Theme, peaks: Mapping[str, Peak], order: list[str]) -> None:
    """Draw a bar for each YAML, split into its parts."""
    left = [0.0] * len(order)
    for part, color in zip(PARTS, COLORS, strict=True):
        widths = [peaks[name][part] for name in order]
        axes.barh(order, widths, 0.7, left, color=theme.series[color], label=part)
        left = list(map(sum, zip(left, widths, strict=True)))
    axes.set_xlabel("peak memory per GPU (GiB)")
    axes.set_yticks(range(len(order)), [f"{name}.yaml" for name in order])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(-0.6, len(order) - 0.4)
    axes.grid(axis="x")


def label_bars(axes: Axes, theme: Theme, peaks: list[Peak], card: float) -> None:
    """Write at the end of each bar its size, and whether it fits a card with `card` GiB."""
    # The line of the card passes behind the words.
    style: dict[str, Any] = {"va": "center", "zorder": 4}
    box = {"facecolor": theme.background, "linewidth": 0, "pad": 1.5}
    for place, peak in enumerate(peaks):
        size = sum(peak.values())
        color = theme.series["red"]
        words = "does not fit"
        if fits(peak, card):
            color = theme.series["green"]
            words = "fits"
        text = f"{size:.0f} GiB, {words}"
        axes.text(size + 1.5, place, text, color=color, bbox=box, **style)
