# SPDX-License-Identifier: Apache-2.0
"""The table of evidence/benchmark_loading.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from proof.markdown import table

from .loading import cells

NOT_MEASURED = (
    "Not measured yet: `python evidence/benchmark_loading.py --json results/loading.json`."
)

# The header of each column of copies
COLUMNS = {
    "private": "private memory, all ranks",
    "held": "held by all ranks",
    "beyond_rank_0": "beyond: rank 0",
    "beyond_others": "beyond: another rank",
    "mapped": "pages of files, all ranks",
}


def block(measured: Mapping[str, Any] | None) -> str:
    """Return the table for a document, or a line that says that nothing was measured."""
    if measured is None:
        return NOT_MEASURED
    rows = {row["config"]: row for row in measured["rows"]}
    names = [cell.mesh.config for cell in cells()]
    text = whole_table([rows[name] for name in names if name in rows])
    missing = [f"`{name}.yaml`" for name in names if name not in rows]
    if missing:
        text += f"\n\nNot measured yet: {', '.join(missing)}."
    return text


def whole_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of what all ranks of a host have between them, in copies of the model."""
    lines = []
    for row in rows:
        line = [f"`{row['config']}.yaml`", str(row["ranks"]), f"{row['parameters'] / 1e9:.2f}B"]
        for name in COLUMNS:
            line.append(f"{row[name]:.2f}")
        lines.append(line)
    header = ["YAML", "ranks", "parameters", *COLUMNS.values()]
    return table(header, lines)
