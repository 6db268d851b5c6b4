# SPDX-License-Identifier: Apache-2.0
"""Loss curves of real runs, from results/curves.json."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator, ScalarFormatter

from .recordings import Recording, recording_of
from .style import Theme, axes_in, figure_of, to_svg

LOSS = "loss (nats per token)"
STEP = "optimizer step"
REFERENCE = "single"
# The name, color and line width of each engine: thick lines below thin ones, so that all are seen
ENGINES = {
    "single": ("one process", "gray", 9.0),
    "ddp": ("DDP", "orange", 6.5),
    "fsdp1": ("FSDP1", "green", 4.5),
    "fsdp2": ("FSDP2", "blue", 2.8),
    "deepspeed": ("DeepSpeed", "purple", 1.2),
}


def label_axes(axes: Axes) -> None:
    """Name both axes, and draw a grid."""
    axes.set_xlabel(STEP)
    axes.set_ylabel(LOSS)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid()


# ---- Every YAML ----


def draw_parity(theme: Theme) -> str:
    """Return the loss curves of all YAMLs, and below how far each is from one process."""
    runs = recording_of("parity")["runs"]
    distances = {}
    for config, run in runs.items():
        distances[config] = differences(run, runs[REFERENCE])
    largest = max(max(distance) for distance in distances.values())
    figure = figure_of(
        theme,
        5.0,
        f"{len(runs)} strategies, one loss curve: they differ by at most {largest:.1e} nats",
        "The same job under every YAML: tiny Llama, fp32, 12 rows per step, on 1, 2 or 4 CPU "
        "ranks.\nNot yet measured in bf16 on several GPUs.",
    )
    above = axes_in(figure, left=0.85, right=2.3, top=0.95, bottom=2.2)
    below = axes_in(figure, left=0.85, right=2.3, top=3.25, bottom=0.5, sharex=above)
    for engine, (name, color, width) in ENGINES.items():
        configs = [config for config in runs if engine_of(config) == engine]
        style: dict[str, Any] = {"color": theme.series[color]}
        for config in configs:
            steps = runs[config]["steps"]
            above.plot(steps, runs[config]["losses"], linewidth=width, **style)
            below.plot(steps, distances[config], linewidth=1.0, **style)
        yamls = "1 YAML" if len(configs) == 1 else f"{len(configs)} YAMLs"
        above.plot([], [], linewidth=width, label=f"{name} ({yamls})", **style)
    above.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    label_axes(above)
    above.set_xlabel("")
    above.tick_params(labelbottom=False)
    label_axes(below)
    below.set_ylabel("distance to\none process")
    below.set_ylim(bottom=0)
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    words = f"largest: {largest:.1e}\nnats per token"
    below.text(1.03, 0.5, words, transform=below.transAxes)
    return to_svg(figure)


def engine_of(config: str) -> str:
    """Return the key of ENGINES of a YAML."""
    return config.split("_")[0]


def differences(run: Recording, reference: Recording) -> list[float]:
    """Return the absolute difference of the loss in each step."""
    pairs = zip(run["losses"], reference["losses"], strict=True)
    return [abs(ours - theirs) for ours, theirs in pairs]


# ---- Killed and resumed ----

# How each run is drawn
WHOLE = {"linewidth": 6, "alpha": 0.5}
KILLED = {"linewidth": 1.8}
RESUMED = {"linewidth": 1.8, "linestyle": (0, (3, 1.5))}


def draw_resume(theme: Theme) -> str:
    """Return a killed run and its continuation, on top of a run that was not interrupted."""
    recording = recording_of("resume")
    killed = recording["killed"]
    whole = recording["uninterrupted"]
    checkpoint = recording["checkpoint"]
    unequal = recording["unequal"]
    title = "Killed and resumed, the run continues bit for bit as if nothing had happened"
    if unequal:
        title = f"Killed and resumed, the run differs in {unequal} steps or tensors"
    figure = figure_of(
        theme,
        4.0,
        title,
        f"Tiny Llama, fp32, {recording['config']}.yaml on {recording['ranks']} CPU ranks, a "
        "checkpoint every 10 steps. SIGKILL to all ranks,\nthen the same command once more: every "
        "loss, gradient norm and final weight is compared. Not yet measured on several GPUs.",
    )
    axes = axes_in(figure, left=0.75, right=0.2, top=0.95, bottom=0.5)
    resumed = steps_after(checkpoint, recording["resumed"])
    plot_run(axes, whole, "uninterrupted run", WHOLE | {"color": theme.series["gray"]})
    plot_run(axes, killed, "until it was killed", KILLED | {"color": theme.series["orange"]})
    label = f"resumed from the checkpoint of step {checkpoint}"
    plot_run(axes, resumed, label, RESUMED | {"color": theme.series["blue"]})
    mark_death(axes, theme, killed)
    axes.legend(loc="upper right")
    label_axes(axes)
    return to_svg(figure)


def plot_run(axes: Axes, run: Recording, label: str, style: dict[str, Any]) -> None:
    """Draw the loss of a run."""
    axes.plot(run["steps"], run["losses"], label=label, **style)


def steps_after(checkpoint: int, run: Recording) -> Recording:
    """Return the part of a run after the step of a checkpoint."""
    first = run["steps"].index(checkpoint) + 1
    return {"steps": run["steps"][first:], "losses": run["losses"][first:]}


def mark_death(axes: Axes, theme: Theme, killed: Recording) -> None:
    """Mark the last step of a killed run."""
    step = killed["steps"][-1]
    loss = killed["losses"][-1]
    color = theme.series["red"]
    axes.plot([step], [loss], "X", color=color, markersize=9, zorder=4)
    words = f"SIGKILL after step {step}"
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "center"}
    # Below the falling curve, which the words would cross elsewhere
    axes.annotate(words, (step, loss), (-10, -4), color=color, **place)


# ---- The quick start ----


def draw_quickstart_curve(theme: Theme) -> str:
    """Return the loss of the quick start, and its exact match before and after training."""
    recording = recording_of("quickstart")
    before = recording["exact_match"]["before"]
    after = recording["exact_match"]["after"]
    figure = figure_of(
        theme,
        3.6,
        f"The quick start: exact match goes from {before:.0%} to {after:.0%} on held-out rows",
        f"make quickstart: a tiny Llama made offline, trained on {recording['cores']} CPU cores. "
        "The loss is on a log scale.",
    )
    left = axes_in(figure, left=0.75, right=3.0, top=0.8, bottom=0.5)
    curve = recording["curve"]
    blue = theme.series["blue"]
    left.plot(curve["steps"], curve["losses"], color=blue, linewidth=1.2)
    left.set_yscale("log")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter(ScalarFormatter())
    left.yaxis.set_minor_locator(NullLocator())
    label_axes(left)
    left.set_ylabel(f"training {LOSS}")
    right = axes_in(figure, left=6.6, right=0.3, top=0.8, bottom=0.5)
    colors = [theme.series["gray"], blue]
    heights = [100 * before, 100 * after]
    bars = right.bar(["before", "after"], heights, 0.6, color=colors)
    labels = [f"{before:.0%}", f"{after:.0%}"]
    right.bar_label(bars, labels, padding=3, weight="bold")
    right.set_ylim(0, 112)
    right.set_yticks([0, 50, 100])
    right.set_ylabel("exact match (%)")
    return to_svg(figure)
