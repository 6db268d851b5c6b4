# SPDX-License-Identifier: Apache-2.0
"""The picture of one run, or of several beside each other: a panel for each thing they recorded."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from plotting.runs import LOSS, MEMORY, SPEEDS, RecordedRun, names_of, smooth

RATE = "learning_rate"
EVALUATIONS = "eval"
# eval_loss is in the panel of the loss, of which the perplexity is another form
NOT_A_PANEL = ("eval_loss", "eval_perplexity")


def wanted_panels(names: Sequence[str] | None, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics to draw that a run has; `eval` stands for those of the evaluations."""
    if names is None:
        names = [LOSS, RATE] if len(runs) == 1 else [LOSS, EVALUATIONS, *SPEEDS, MEMORY, RATE]
    panels: dict[str, None] = {}
    for name in names:
        found = [MEMORY if name == "memory" else name]
        if name == EVALUATIONS:
            found = [metric for run in runs for metric in run.eval_metrics()]
            found = [metric for metric in found if metric not in NOT_A_PANEL]
        panels |= dict.fromkeys(found)
    return [panel for panel in panels if any(run.curve(panel)[0] for run in runs)]


def draw(runs: Sequence[RecordedRun], panels: Sequence[str]) -> Figure:
    """Return the picture of all runs.

    Args:
        panels: names of metrics in metrics.jsonl.
    """
    figure = Figure(figsize=(8, 1 + 2.4 * len(panels)), layout="constrained")  # inches
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    for panel, axes in zip(panels, grid[:, 0], strict=True):
        draw_panel(axes, panel, runs)
    grid[-1, 0].set_xlabel("optimizer step")
    if len(runs) > 1:
        lines, _ = grid[0, 0].get_legend_handles_labels()
        figure.legend(lines, names_of(runs), loc="outside lower left", frameon=False)
    return figure


def draw_panel(axes: Axes, panel: str, runs: Sequence[RecordedRun]) -> None:
    """Draw the curve of each run; of losses also the evaluations, and the steps as they are."""
    label = panel.replace("_", " ")
    units = {run.facts.get("loss_unit") for run in runs}
    if panel == LOSS and len(units) == 1 and None not in units:
        label += f" ({units.pop()})"
    axes.set_ylabel(label)
    axes.grid(alpha=0.25)
    for number, run in enumerate(runs):
        color = f"C{number}"
        steps, values = run.curve(panel)
        if panel == LOSS:
            axes.plot(steps, values, color=color, alpha=0.25)
            axes.plot(*run.curve("eval_loss"), "o", color=color)
            values = smooth(values)
        axes.plot(steps, values, color=color, label=run.folder)
    if panel in (*SPEEDS, MEMORY):
        axes.set_ylim(bottom=0)
