# SPDX-License-Identifier: Apache-2.0
"""The tables of evidence/checkpoint_memory.py."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from proof.markdown import table

from .strategies import Results, rank_of

MB = 10**6
GB = 10**9
KINDS = ("checkpoint", "background", "folder")
NOT_MEASURED = (
    "Not measured yet: "
    "`python evidence/checkpoint_memory.py --json results/checkpoint_memory.json`."
)


def checkpoint_memory_block(results: Results) -> str:
    """Return the table for a document, or a line that says that nothing was measured."""
    if "checkpoint_memory" not in results:
        return NOT_MEASURED
    return checkpoint_memory_table(results["checkpoint_memory"]["rows"])


def checkpoint_memory_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the memory that a rank took to save, beside what it may take, by YAML."""
    lines = []
    for row in sorted(rows, key=lambda row: rank_of(row["config"])):
        line = [f"`{row['config']}.yaml`", str(row["ranks"])]
        line += [grown_text(row["checkpoint"]), grown_text(row["background"])]
        line.append(bound_text(row["checkpoint"]))
        line += [grown_text(row["folder"]), bound_text(row["folder"])]
        lines.append(line)
    header = ["YAML", "ranks", "checkpoint: MB, by rank", "with `--async_save`", "bound"]
    header += ["folder: the same", "bound"]
    return table(header, lines)


def grown_text(saved: Mapping[str, Any]) -> str:
    """Return the MB by which each rank grew."""
    return " ".join(map(cell_text, saved["grown"], bounds_of(saved)))


def bound_text(saved: Mapping[str, Any]) -> str:
    """Return the MB by which each rank may grow, as the rank with the smallest share may."""
    return f"{min(bounds_of(saved)) / MB:.0f}"


def cell_text(grown: int, bound: int) -> str:
    """Return the MB by which a rank grew, bold if that is beyond its bound."""
    text = f"{grown / MB:.0f}"
    return text if grown <= bound else f"**{text}**"


def checkpoint_plan_block(results: Results) -> str:
    """Return the table of what large models need, or a line that says that it was not made."""
    if "checkpoint_memory" not in results:
        return NOT_MEASURED
    return checkpoint_plan_table(results["checkpoint_memory"]["planned"])


def checkpoint_plan_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the memory that a rank, and a host of eight, needs to save a large model, in GB."""
    lines = []
    for row in rows:
        sizes = [row[key] for key in ("whole", "share", "largest", "most", "host")]
        cells = [f"{size / GB:.1f}" for size in sizes]
        lines.append([row["model"], str(row["ranks"]), *cells])
    names = ["checkpoint", "largest share", "largest tensor", "bound of a rank", "host of 8 ranks"]
    return table(["parameters", "ranks", *(f"{name}, GB" for name in names)], lines)


def bounds_of(saved: Mapping[str, Any]) -> list[int]:
    """Return the bytes that each rank may take: its share, and twice the largest tensor."""
    return [share + 2 * saved["largest"] for share in saved["shares"]]


def is_within(row: Mapping[str, Any]) -> bool:
    """Return whether no rank of a YAML took more than it may."""
    return all(is_kept(row[kind]) for kind in KINDS)


def is_kept(saved: Mapping[str, Any]) -> bool:
    """Return whether no rank took more than it may for one thing that was saved."""
    return all(map(operator.le, saved["grown"], bounds_of(saved)))
