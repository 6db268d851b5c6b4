# SPDX-License-Identifier: Apache-2.0
"""The tables of evidence/benchmark_start.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from proof.markdown import table

GIB = 2**30
MIB = 2**20
NOT_MEASURED = "Not measured yet: `python evidence/benchmark_start.py --json results/start.json`."

Rows = Sequence[Mapping[str, Any]]


def block(measured: Mapping[str, Any] | None) -> str:
    """Return the tables for a document, or a line that says that nothing was measured."""
    if measured is None:
        return NOT_MEASURED
    return whole_text(measured)


def whole_text(measured: Mapping[str, Rows]) -> str:
    """Return the three tables."""
    tables = [deal_table(measured["deal"]), owners_table(measured["owners"])]
    tables.append(planner_table(measured["planner"]))
    return "\n\n".join(tables)


def deal_table(rows: Rows) -> str:
    """Return the table of what it takes a rank to find out which rows are its own."""
    lines = []
    for row in rows:
        line = [f"`{row['strategy']}`", f"{row['ranks']:,}", f"{row['simulated']:,}"]
        line += [f"{row['first_ms']:.1f}", f"{row['further_ms']:.2f}"]
        line.append(f"{row['peak_bytes'] / MIB:.1f}")
        lines.append(line)
    header = ["`--train_sampling_strategy`", "ranks", "simulated"]
    header += ["first batch, ms", "each further batch, ms", "MiB of a rank"]
    return table(header, lines)


def owners_table(rows: Rows) -> str:
    """Return the table of the owners of a checkpoint."""
    lines = []
    for row in rows:
        line = [row["model"], f"{row['ranks']:,}", f"{row['tensors']:,}"]
        for size in (row["whole"] / row["ranks"], row["largest_share"], row["largest_tensor"]):
            line.append(f"{size / GIB:.2f}")
        line.append(f"{row['ms']:.0f}")
        lines.append(line)
    header = ["model", "ranks", "tensors", "equal share, GiB", "largest share, GiB"]
    header += ["largest tensor, GiB", "ms"]
    return table(header, lines)


def planner_table(rows: Rows) -> str:
    """Return the table of the planner's answers."""
    lines = []
    for row in rows:
        line = [row["model"], f"{row['ranks']:,}", f"{row['peak'] / GIB:.1f}"]
        line.append(f"{row['seconds']:.1f}")
        lines.append(line)
    return table(["model", "GPUs", "planned peak of a GPU, GiB", "s"], lines)
