# SPDX-License-Identifier: Apache-2.0
"""The table of evidence/benchmark_planning.py."""

from collections.abc import Mapping, Sequence
from typing import Any

from proof.markdown import table

MIB = 2**20
PHASES = ("read and check", "fingerprint", "pack", "first batch")
NOT_MEASURED = (
    "Not measured yet: `python evidence/benchmark_planning.py --json results/planning.json`."
)


def block(measured: Mapping[str, Any] | None) -> str:
    """Return the table for a document, or a line that says that nothing was measured."""
    if measured is None:
        return NOT_MEASURED
    return whole_table(measured["rows"])


def whole_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of what planning takes, by number of rows."""
    lines = []
    for row in results:
        seconds = []
        for name in PHASES:
            found = row["seconds"].get(name)
            seconds.append("" if found is None else f"{found:.1f}")
        private = sum(row["private_bytes"]) / MIB
        shared = row["shared_bytes"] / MIB
        line = [f"{row['rows']:,}", str(row["ranks"])]
        line.append(f"{row['full']:.2%}" if row["packs"] else "not packed")
        line += seconds
        line.append(f"{sum(row['seconds'].values()):.1f}")
        line.append(f"{private:,.0f} + {shared:,.0f}")
        lines.append(line)
    header = ["rows", "ranks", "lines full", *PHASES, "seconds in all", "MiB on the host"]
    return table(header, lines)
