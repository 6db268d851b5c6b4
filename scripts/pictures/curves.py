# SPDX-License-Identifier: Apache-2.0
"""Loss curves of real runs, from results/curves.json."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, ScalarFormatter

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
    largest = max(max(differences(run, runs[REFERENCE])) for run in runs.values())
    figure = figure_of(
        theme,
        5.0,
        f"{len(runs)} strategies, one loss curve: they differ by at most {largest:.1e} nats",
        "The same job under every YAML: tiny Llama, fp32, 12 rows per step, on 1, 2 or 4 CPU "
        "ranks.\nNot yet measured in bf16 on GPUs.",
    )
    above = axes_in(figure, left=0.85, right=2.3, top=0.95, bottom=2.2)
    below = axes_in(figure, left=0.85, right=2.3, top=3.25, bottom=0.5, sharex=above)
    for engine, (name, color, width) in ENGINES.items():
        configs = [config for config in runs if config.split("_")[0] == engine]
        yamls = "1 YAML" if len(configs) == 1 else f"{len(configs)} YAMLs"
        for config in configs:
            run = runs[config]
            style: dict[str, Any] = {"color": theme.series[color]}
            above.plot(run["steps"], run["losses"], linewidth=width, **style)
            below.plot(run["steps"], differences(run, runs[REFERENCE]), linewidth=1.0, **style)
        above.plot([], [], color=theme.series[color], linewidth=width, label=f"{name} ({yamls})")
    above.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    label_axes(above)
    above.set_xlabel("")
    above.tick_params(labelbottom=False)
    label_axes(below)
    below.set_ylabel("distance to\none process")
    below.set_ylim(bottom=0)
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0), useMathText=True)
    below.text(1.03, 0.5, f"largest: {largest:.1e}\nnats per token", transform=below.transAxes)
    return to_svg(figure)


def differences(run: Recording, reference: Recording) -> list[float]:
    """Return the absolute difference of the loss in each step."""
    pairs = zip(run["losses"], reference["losses"], strict=True)
    return [abs(ours - theirs) for ours, theirs in pairs]


# ---- Killed and resumed ----


def draw_resume(theme: Theme) -> str:
    """Return a killed run and its continuation, on top of a run that was not interrupted."""
    recording = recording_of("resume")
    killed = recording["killed"]
    whole = recording["uninterrupted"]
    checkpoint = recording["checkpoint"]
    title = "Killed and resumed, the run continues bit for bit as if nothing had happened"
    if recording["unequal"]:
        title = f"Killed and resumed, the run differs in {recording['unequal']} steps or tensors"
    figure = figure_of(
        theme,
        4.0,
        title,
        f"Tiny Llama, fp32, {recording['config']}.yaml on {recording['ranks']} CPU ranks, a "
        "checkpoint every 10 steps. SIGKILL to all ranks,\nthen the same command once more: every "
        "loss, gradient norm and final weight is compared. Not yet measured on GPUs.",
    )
    axes = axes_in(figure, left=0.75, right=0.2, top=0.95, bottom=0.5)
    axes.plot(
        whole["steps"],
        whole["losses"],
        color=theme.series["gray"],
        linewidth=6,
        alpha=0.5,
        label="uninterrupted run",
    )
    style: dict[str, Any] = {"linewidth": 1.8}
    axes.plot(
        killed["steps"],
        killed["losses"],
        color=theme.series["orange"],
        label="until it was killed",
        **style,
    )
    pairs = zip(recording["resumed"]["steps"], recording["resumed"]["losses"], strict=True)
    resumed = [(step, loss) for step, loss in pairs if step > checkpoint]
    axes.plot(
        *zip(*resumed, strict=True),
        color=theme.series["blue"],
        linestyle=(0, (3, 1.5)),
        label=f"resumed from the checkpoint of step {checkpoint}",
        **style,
    )
    mark_death(axes, theme, killed)
    axes.legend(loc="upper right")
    label_axes(axes)
    return to_svg(figure)


def mark_death(axes: Axes, theme: Theme, killed: Recording) -> None:
    """Mark the last step of a killed run."""
    step = killed["steps"][-1]
    loss = killed["losses"][-1]
    color = theme.series["red"]
    axes.plot([step], [loss], "X", color=color, markersize=9, zorder=4)
    axes.annotate(
        f"SIGKILL after step {step}",
        (step, loss),
        xytext=(8, 8),
        textcoords="offset points",
        color=color,
    )


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
    left.plot(curve["steps"], curve["losses"], color=theme.series["blue"], linewidth=1.2)
    left.set_yscale("log")
    left.yaxis.set_major_formatter(ScalarFormatter())
    label_axes(left)
    left.set_ylabel(f"training {LOSS}")
    right = axes_in(figure, left=6.6, right=0.3, top=0.8, bottom=0.5)
    colors = [theme.series["gray"], theme.series["blue"]]
    bars = right.bar(["before", "after"], [100 * before, 100 * after], 0.6, color=colors)
    right.bar_label(bars, [f"{before:.0%}", f"{after:.0%}"], padding=3, weight="bold")
    right.set_ylim(0, 112)
    right.set_yticks([0, 50, 100])
    right.set_ylabel("exact match (%)")
    return to_svg(figure)
