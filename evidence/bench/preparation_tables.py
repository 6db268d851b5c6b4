# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of the results of evidence/benchmark_rows.py."""

import statistics
from collections.abc import Iterable

from proof.markdown import table

from .cells import Result, Results, Run
from .figures import labels_of, paired, reasons_of, spread, spread_of, values
from .tables import facts_of

NAMES = {
    "ours": "this recipe",
    "ours without marks": "this recipe, template without marks",
    "trl": "SFTTrainer",
}
REFERENCE = "trl"
NOT_MEASURED = "Not measured yet: `python evidence/benchmark_rows.py`."


def whole_table(cell: Result) -> str:
    """Return everything about a cell as one table."""
    header = ["contestant", "runs", "CPU seconds, least", "CPU seconds, median"]
    header += ["rows per second", "relative to SFTTrainer", "void"]
    return table(header, [whole_row(cell, label) for label in labels_of(cell)])


def whole_row(cell: Result, label: str) -> list[str]:
    """Return the line of one contestant in the table of a cell."""
    seconds = list(values(cell, label, "cpu_seconds").values())
    least = ""
    median = ""
    if seconds:
        least = f"{min(seconds):.2f}"
        median = f"{statistics.median(seconds):.2f}"
    rate = spread_of(cell, label, "rows_per_second", "{:,.0f}")
    void = "; ".join(reasons_of(cell, label))
    return [NAMES[label], str(len(seconds)), least, median, rate, lead(cell, label), void]


def lead(cell: Result, label: str) -> str:
    """Return the rate relative to SFTTrainer's, "" for SFTTrainer itself."""
    if label == REFERENCE:
        return ""
    return spread(paired(cell, label, REFERENCE, "rows_per_second"))


def details(results: Results) -> str:
    """Return the section of results/README.md: every cell."""
    parts = []
    for cell in results["cells"]:
        parts.append(f"## {cell['cell']} per row, {cell['rows']:,} rows")
        parts.append(f"{facts_of(cell)}; --max_length {cell['max_length']}.")
        parts += filter(None, [about_load(cell["runs"])])
        parts.append(whole_table(cell))
    return "\n\n".join(parts)


def about_load(runs: Iterable[Run]) -> str:
    """Return a sentence that says that the machine was busy with other work, "" if it was not."""
    counted = [run for run in runs if not run["void"]]
    loads = [max(run["load"]) for run in counted if run["loaded"]]
    if not loads:
        return ""
    return (
        f"The machine did other work during {len(loads)} of {len(counted)} runs (load average up "
        f"to {max(loads):.1f}), which adds CPU time to all of them."
    )


def block(results: Results | None) -> str:
    """Return the table of docs/benchmarks.md."""
    if not results:
        return NOT_MEASURED
    lines = []
    for cell in results["cells"]:
        rows = f"{cell['cell']}, {cell['rows']:,} rows"
        for label in labels_of(cell):
            rate = spread_of(cell, label, "rows_per_second", "{:,.0f}")
            if not rate:
                rate = f"void: {'; '.join(reasons_of(cell, label))}"
            lines.append([rows, NAMES[label], rate, lead(cell, label)])
    header = ["questions per row", "prepared by"]
    header += ["rows per second and core", "relative to SFTTrainer"]
    runs = [run for cell in results["cells"] for run in cell["runs"]]
    return "\n\n".join(filter(None, [table(header, lines), about_load(runs)]))
