# SPDX-License-Identifier: Apache-2.0
"""What plot_loss.py draws of several runs, from results/curves.json."""

from plotting.panels import LOSS, LOSS_UNIT, MEMORY, RATE, choose_panels
from plotting.picture import draw
from plotting.runs import RecordedRun

from .recordings import recording_of
from .style import Theme, to_svg


def draw_comparison(theme: Theme) -> str:
    """Return the picture of runs that differ in their learning rate.

    It has no speed, which would be that of a machine with other work.

    Args:
        theme: in force as matplotlib's settings; the curves have the same colors in each.
    """
    runs = [RecordedRun(**run) for run in recording_of("comparison")["runs"]]
    for run in runs:
        run.facts[LOSS_UNIT] = "nats per token"  # that of llama.py
    panels, _ = choose_panels([LOSS, MEMORY, RATE], runs)
    return to_svg(draw(runs, panels))
