# SPDX-License-Identifier: Apache-2.0
"""The table of evidence/benchmark_saving.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from proof.markdown import table

NOT_MEASURED = "Not measured yet: `python evidence/benchmark_saving.py --json results/saving.json`."
HEADER = [
    "ranks",
    "",
    "MB of a checkpoint",
    "s held up by a save",
    "s until it is whole",
    "s of a step",
    "s of a step beside a save",
    "s of training",
]


def block(measured: Mapping[str, Any] | None) -> str:
    """Return the table for a document, or a line that says that nothing was measured."""
    if measured is None:
        return NOT_MEASURED
    return whole_table(measured["rows"])


def whole_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of how long training is held up."""
    lines = []
    for row in results:
        in_background = row["in_background"]
        beside = f"{row['step_beside_seconds']:.2f}" if row["step_beside_seconds"] else ""
        lines.append(
            [
                str(row["ranks"]),
                "`--async_save`" if in_background else "",
                f"{row['checkpoint_bytes'] / 1e6:,.0f}",
                f"{row['held_up_seconds']:.2f}",
                f"{row['until_whole_seconds']:.2f}",
                f"{row['step_seconds']:.2f}",
                beside,
                f"{row['training_seconds']:.1f}",
            ]
        )
    return table(HEADER, lines)
