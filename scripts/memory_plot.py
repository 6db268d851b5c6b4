"""The pictures of a memory plan: every strategy against the card, and the peak against the length of the rows."""

from dataclasses import replace

import matplotlib

from memory_cards import GIB, constants_of
from memory_choice import allows, config_files
from memory_plan import closed_form, plan_of
from model_shapes import Unplannable

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

COLORS = {
    "parameters": "#3b6ea5",
    "quantization": "#6f9bc8",
    "adapters": "#a7c4e2",
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
LENGTHS = [2**power for power in range(9, 18)]
CURVES = 6


def plans(recipe_args, args, ranks, read):
    """{file: Plan} of every YAML that the ranks allow and the recipe does not refuse. read(path): its config."""
    found = {}
    for path in config_files():
        config = read(path)
        if not allows(config, ranks, args.num_machines or 1):
            continue
        try:
            found[path.stem] = plan_of(
                recipe_args, config, ranks, args.num_machines, args.mixed_precision
            )
        except Unplannable:
            continue
    return found


def held(plan, model, batch):
    device, _ = closed_form(plan, model, batch)
    return device | constants_of(plan, device)


def longer(batch, length):
    """The batch with rows of another length, as much of which is learnt."""
    return replace(batch, tokens=length, learnt=max(batch.learnt * length // batch.tokens, 1))


def draw(path, title, found, model, batch, card):
    """Write the two pictures into one file.

    found: {name: Plan}. card: bytes, or None. Raises OSError and ValueError of matplotlib."""
    heights = [0.28 * len(found) + 0.6, 3.2]
    size = 9, sum(heights) + 0.7
    figure, (bars, curves) = plt.subplots(
        2, 1, figsize=size, height_ratios=heights, layout="constrained"
    )
    device = {name: held(plan, model, batch) for name, plan in found.items()}
    order = sorted(device, key=lambda name: -sum(device[name].values()))
    left = dict.fromkeys(order, 0.0)
    for category, color in COLORS.items():
        sizes = [device[name].get(category, 0) / GIB for name in order]
        if any(sizes):
            bars.barh(
                order,
                sizes,
                left=[left[name] for name in order],
                color=color,
                label=category,
                height=0.72,
            )
        left = {name: left[name] + size for name, size in zip(order, sizes, strict=True)}
    bars.set_xlabel("GiB of a GPU at the peak")
    bars.set_title(title, fontsize=10, loc="left")
    shown = [name for name in order if name in spread(order)]
    for number, name in enumerate(shown):
        peaks = [
            sum(held(found[name], model, longer(batch, length)).values()) / GIB
            for length in LENGTHS
        ]
        curves.plot(LENGTHS, peaks, "o-", markersize=3, color=f"C{number}", label=name)
    curves.set(
        xscale="log",
        yscale="log",
        xlabel=f"tokens a row, {batch.lines} rows a micro-batch",
        ylabel="GiB",
    )
    curves.set_xticks(LENGTHS, [f"{length:,}" for length in LENGTHS])
    curves.minorticks_off()
    if card:
        for mark in (bars.axvline, curves.axhline):
            mark(
                card / GIB,
                color="black",
                linestyle="--",
                linewidth=1,
                label=f"card, {card / GIB:.0f} GiB",
            )
    for axes in (bars, curves):
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    curves.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    figure.savefig(path, dpi=150)
    plt.close(figure)


def spread(names):
    """At most CURVES of the names, the first and the last among them."""
    if len(names) <= CURVES:
        return names
    return [names[round(i * (len(names) - 1) / (CURVES - 1))] for i in range(CURVES)]
