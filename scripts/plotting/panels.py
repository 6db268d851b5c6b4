# SPDX-License-Identifier: Apache-2.0
"""Which panels a picture has, which curve a run has in each, and what cannot be shown."""

from collections.abc import Sequence
from dataclasses import dataclass

from plotting.calls import COUNTS, speed_name, speeds_of
from plotting.curves import Curve, curve_of
from plotting.labels import LONGEST_NAME, names_of, shortened
from plotting.runs import RecordedRun

LOSS = "loss"
EVALUATIONS = "eval"
SPEED = "tokens_per_second"
MEMORY = "memory"
RATE = "learning_rate"
OF_ONE_RUN = [LOSS, RATE]
OF_SEVERAL_RUNS = [LOSS, EVALUATIONS, SPEED, MEMORY, RATE]
# eval_loss is in the panel of the loss, of which the perplexity is another form
NOT_A_PANEL = ("eval_loss", "eval_perplexity")
LOSS_UNIT = "loss_unit"  # in run.json, which runs of earlier versions have without it
METRIC_OF_PANEL = {MEMORY: "peak_memory_gib"}
TITLES = {
    "tokens_per_second": "tokens per second",
    "images_per_second": "images per second",
    MEMORY: "peak memory of\nrank 0 (GiB)",
    RATE: "learning rate",
}


@dataclass(frozen=True)
class Panel:
    """One panel of a picture.

    Attributes:
        name: of what it shows: one of the names above, or a metric of metrics.jsonl.
        title: of its axis.
        curves: for each run; empty where the run has not recorded it.
    """

    name: str
    title: str
    curves: list[Curve]


def choose_panels(
    names: Sequence[str], runs: Sequence[RecordedRun]
) -> tuple[list[Panel], list[str]]:
    """Return the panels that can be shown, and a line about each thing that is missing.

    Args:
        names: of panels, or of metrics in metrics.jsonl.
    """
    panels = []
    lines = []
    is_unknown = False
    for name in names:
        found = panels_of(name, runs)
        shown = [panel for panel in found if any(curve.steps for curve in panel.curves)]
        panels += shown
        if not shown:
            lines.append(f"no panel {name}: {what_is_missing(name)}")
            is_unknown = is_unknown or name not in OF_SEVERAL_RUNS
        for panel in shown:
            lines += missing_in(panel, runs)
    if is_unknown:
        lines.append(f"panels that these runs have: {', '.join(possible_panels(runs))}")
    return panels, lines


def panels_of(name: str, runs: Sequence[RecordedRun]) -> list[Panel]:
    """Return the panels of a name: `eval` is one for each metric of an evaluation."""
    if name == EVALUATIONS:
        metrics = [metric for metric in evaluation_metrics(runs) if metric not in NOT_A_PANEL]
        return [panel for metric in metrics for panel in panels_of(metric, runs)]
    if name == SPEED:
        return speed_panels(runs)
    metric = METRIC_OF_PANEL.get(name, name)
    if name == LOSS:
        return [Panel(name, loss_title(runs), [curve_of(run.lines, metric) for run in runs])]
    title = TITLES.get(name, name.removeprefix("eval_").replace("_", " "))
    if name.startswith("eval_"):
        title = f"{title}\n(evaluation)"
    return [Panel(name, title, [curve_of(run.lines, metric) for run in runs])]


def loss_title(runs: Sequence[RecordedRun]) -> str:
    """Return the title of the losses: with their unit, if all runs say that they have the same."""
    units = [run.facts.get(LOSS_UNIT) for run in runs]
    if not isinstance(units[0], str) or units.count(units[0]) < len(units):
        return LOSS
    return f"{LOSS} ({units[0]})"


def speed_panels(runs: Sequence[RecordedRun]) -> list[Panel]:
    """Return one panel for runs that count tokens, and one for those that count images."""
    panels = []
    for speed in COUNTS:
        curves = []
        for run in runs:
            curve = Curve([], [])
            if speed_name(run) == speed:
                curve = speeds_of(run)
            curves.append(curve)
        panels.append(Panel(speed, TITLES[speed], curves))
    return panels


def evaluation_metrics(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of the metrics of all evaluations, in the order of their lines."""
    names: dict[str, None] = {}
    for run in runs:
        for line in run.evaluations:
            names |= dict.fromkeys(name for name in line if name.startswith("eval_"))
    return list(names)


def what_is_missing(name: str) -> str:
    """Return why no run has anything to show in a panel."""
    if name == EVALUATIONS:
        return "no run has evaluations with a metric besides the loss"
    if name == SPEED:
        return "no run has two logged steps with elapsed_seconds and without an evaluation between"
    return f"no run has {METRIC_OF_PANEL.get(name, name)} in its metrics.jsonl"


def possible_panels(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the names of all panels that have something to show for at least one run."""
    names = dict.fromkeys(OF_SEVERAL_RUNS)
    for run in runs:
        for line in run.lines:
            names |= dict.fromkeys(line)
    # These are in a panel of another name, or no measurement
    others = {*METRIC_OF_PANEL.values(), "step"}
    found = []
    for name in names:
        panels = [] if name in others else panels_of(name, runs)
        if any(curve.steps for panel in panels for curve in panel.curves):
            found.append(name)
    return found


def missing_in(panel: Panel, runs: Sequence[RecordedRun]) -> list[str]:
    """Return a line about the runs that have nothing to show in a panel that others fill."""
    missing = []
    for name, curve in zip(names_of(runs), panel.curves, strict=True):
        if not curve.steps:
            missing.append(shortened(name, LONGEST_NAME))
    if not missing:
        return []
    return [f"panel {panel.name}: not recorded by {', '.join(missing)}"]
