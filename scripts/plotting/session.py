# SPDX-License-Identifier: Apache-2.0
"""What plot_loss.py does with its command line: the picture, and the numbers as table and JSON."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from common import Exit, stop
from plotting.picture import draw
from plotting.runs import LOSS, MEMORY, SPEEDS, RecordedRun, names_of, read_run, rows_of, table

RATE = "learning_rate"
EVALUATIONS = "eval"
# eval_loss is in the panel of the loss, of which the perplexity is another form
NOT_A_PANEL = ("eval_loss", "eval_perplexity")


def run(args: argparse.Namespace) -> None:
    """Draw the runs that the command line names, and print how several of them compare."""
    runs = [read_run(folder) for folder in args.run_dirs]
    panels = []
    for panel in wanted_panels(args.panels, runs):
        if any(one.curve(panel)[0] for one in runs):
            panels.append(panel)
    if not panels:
        stop(Exit.DATA, f"no panel {' '.join(args.panels)}: no run has it in its metrics.jsonl")
    name = "loss.png" if len(runs) == 1 else "comparison.png"
    output = args.output or Path(runs[0].folder, name)
    rows = rows_of(runs)
    try:
        draw(runs, panels).savefig(output, dpi=150)
        if args.json is not None:
            content = {"runs": rows}
            args.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:  # An unknown ending is a ValueError
        stop(Exit.CANNOT_WRITE, f"cannot write {output}: {error}")
    if len(runs) > 1:
        print("\n".join(table(names_of(runs), rows)))
        print()
    print(output)


def wanted_panels(names: Sequence[str] | None, runs: Sequence[RecordedRun]) -> list[str]:
    """Return the metrics that are drawn; `eval` stands for those of the evaluations."""
    if names is None:
        names = [LOSS, RATE] if len(runs) == 1 else [LOSS, EVALUATIONS, *SPEEDS, MEMORY, RATE]
    panels: dict[str, None] = {}
    for name in names:
        found = [MEMORY if name == "memory" else name]
        if name == EVALUATIONS:
            found = []
            for one in runs:
                found += [metric for metric in one.eval_metrics() if metric not in NOT_A_PANEL]
        panels |= dict.fromkeys(found)
    return list(panels)
