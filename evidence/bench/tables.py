# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of the results of evidence/benchmark.py, and the text of their file."""

import json
import statistics
from collections.abc import Callable, Sequence

from proof.markdown import table

from .cells import Result, Results, Run
from .figures import (
    NAMES,
    labels_of,
    milliseconds_more,
    name_of,
    named,
    paired,
    reasons_of,
    spread,
    spread_of,
    values,
)
from .operations import flops_per_token, peak_of

TOOLS = ("lean", "ours", "trainer", "trl")
# {cell: its name in the README}
MATCHED_ROWS = {
    "matched, medium": "36M parameters, 2 rows",
    "matched, medium, LoRA": "the same, LoRA",
    "matched, medium, accumulation": "the same, 2 x 2 rows accumulated",
}
PEAKS = ("resident", "allocated", "active", "reserved")
ALWAYS_SHOWN = ("contestant", "runs")


# ---- While it runs ----


def line_of(name: str, run: Run) -> str:
    """Return one line about a run that has just ended."""
    contestant = f"{name}: {run['contestant']}"
    if "failed" in run:
        return f"FAILED  {contestant}: {run['failed']}"
    step = ""
    if "seconds_per_step" in run:
        step = f"{run['seconds_per_step'] * 1e3:,.1f} ms per step, "
    first = f"first after {run['seconds_to_first_step']:.1f} s"
    return f"{run['repeat']:>6}  {contestant}: {step}{first}, load {run['load'][0]:.2f}"


# ---- A whole cell ----


def whole_table(cell: Result) -> str:
    """Return everything about a cell as one table; empty columns are left out."""
    rows = [whole_row(cell, label) for label in labels_of(cell)]
    columns = list(ALWAYS_SHOWN)
    for name in dict.fromkeys(name for row in rows for name in row):
        if name not in columns and any(row[name] for row in rows):
            columns.append(name)
    return table(columns, [[row[name] for name in columns] for row in rows])


def whole_row(cell: Result, label: str) -> dict[str, str]:
    """Return the columns of one contestant, by their headings."""
    counted = values(cell, label, "seconds_to_first_step")
    return {
        "contestant": label,
        "runs": str(len(counted)),
        **speed_columns(cell, label),
        **memory_columns(cell, label),
        **utilization(cell, label),
        "difference": spread_of(cell, label, "difference", "{:.1e}"),
        "void": "; ".join(reasons_of(cell, label)),
    }


def speed_columns(cell: Result, label: str) -> dict[str, str]:
    """Return times and rates, and their ratios to those of the other contestants."""
    seconds = values(cell, label, "seconds_per_step").values()
    over_lean = paired(cell, label, "lean", of=milliseconds_more)
    return {
        "ms per step": spread([1e3 * each for each in seconds], "{:,.1f}"),
        "step time relative to the plain loop": times_the_loop(cell, label, "floor"),
        "relative to the plain loop without unneeded logits": times_the_loop(cell, label, "lean"),
        "ms over lean": spread(over_lean, "{:+.2f}"),
        "tokens/s without padding": spread_of(cell, label, "tokens_per_second", "{:,.0f}"),
        "this recipe is faster by a factor of": lead_as_shipped(cell, label),
        "s to the first step": spread_of(cell, label, "seconds_to_first_step"),
    }


def times_the_loop(cell: Result, label: str, loop: str) -> str:
    """Return the step time relative to a bare loop's; "" for tools as shipped.

    The steps of tools as shipped do different amounts of work.
    """
    if cell["kind"] == "shipped":
        return ""
    return spread(paired(cell, label, loop), "{:.3f}")


def lead_as_shipped(cell: Result, label: str) -> str:
    """Return the recipe's real tokens per second relative to a contestant's, as shipped."""
    if cell["kind"] != "shipped":
        return ""
    return spread(paired(cell, "ours", label, "tokens_per_second"))


def memory_columns(cell: Result, label: str) -> dict[str, str]:
    """Return the peaks in MiB."""
    columns = {}
    for name in PEAKS:
        heading = "MiB" if name == "resident" else f"MiB {name}"
        columns[heading] = spread_of(cell, label, f"memory.{name}", "{:,.0f}")
    return columns


def utilization(cell: Result, label: str) -> dict[str, str]:
    """Return TFLOP/s and the share of the device's peak, in both conventions.

    They are "" unless all rows are full; the share is also "" if the peak is not known.
    """
    columns = {"TFLOP/s": "", "MFU": "", "MFU, causal": ""}
    rates = list(values(cell, label, "tokens_per_second").values())
    if cell["rows"] != "long" or not rates:
        return columns
    flags = cell["flags"][label]
    shape = cell["models"].get(label) or next(iter(cell["models"].values()))
    lora = flags.get("use_peft", False)
    rate = statistics.median(rates)
    whole = flops_per_token(shape, flags["max_length"], lora) * rate
    causal = flops_per_token(shape, flags["max_length"], lora, causal=True) * rate
    columns["TFLOP/s"] = f"{whole / 1e12:.3g}"
    peak = peak_of(cell["device"])
    if peak:
        columns["MFU"] = f"{whole / peak:.1%}"
        columns["MFU, causal"] = f"{causal / peak:.1%}"
    return columns


def details(results: Results) -> str:
    """Return the section of results/README.md: every cell with how to measure it again."""
    parts = []
    for cell in results["cells"]:
        commands = "\n".join(f"# {label}\n{command}" for label, command in cell["commands"].items())
        parts.append(f"## {cell['cell']}")
        parts.append(f"{facts_of(cell)}; {cell['warmup']} steps of warm-up.")
        parts.append(whole_table(cell))
        parts.append(f"```\n{commands}\n```")
    return "\n\n".join(parts)


def facts_of(cell: Result) -> str:
    """Return when and with what a cell was measured: date, commit, device and versions."""
    versions = ", ".join(f"{name} {version}" for name, version in cell["versions"].items())
    return f"{cell['date']}, commit {cell['commit']}, {cell['device']}, {versions}"


# ---- The README ----


def block(results: Results | None) -> str:
    """Return the README's tables of speed."""
    if not results:
        return "Not measured yet."
    parts = [matched_table(results), shipped_table(results)]
    return "\n\n".join(part for part in parts if part)


def matched_table(results: Results) -> str:
    """Return the table of the time that each tool takes for the batches of a bare loop."""
    lines = []
    for name, text in MATCHED_ROWS.items():
        lines += tools_row(
            results, name, f"{text}: step time relative to the plain loop", times_the_floor
        )
    text = "almost no compute: extra ms per step over the plain loop"
    lines += tools_row(results, "matched, near zero", text, milliseconds_over_floor)
    for cache in ("cold", "warm"):
        text = f"seconds until the first step ends, {cache} data cache"
        lines += tools_row(results, f"start, {cache} cache", text, seconds_to_first_step)
    header = ["same batches, same losses", *(NAMES[tool] for tool in TOOLS)]
    return table(header, lines)


def tools_row(
    results: Results, name: str, text: str, of: Callable[[Result, str], str]
) -> list[list[str]]:
    """Return the row of a cell, with `of(cell, tool)` for each tool; [] if it was not measured."""
    cell = named(results, name)
    if cell is None:
        return []
    return [[text, *(of(cell, tool) for tool in TOOLS)]]


def times_the_floor(cell: Result, label: str) -> str:
    """Return a contestant's step time relative to the bare loop's."""
    return spread(paired(cell, label, "floor"), "{:.3f}") or "void"


def milliseconds_over_floor(cell: Result, label: str) -> str:
    """Return the milliseconds per step that a contestant takes longer than the bare loop."""
    return spread(paired(cell, label, "floor", of=milliseconds_more), "{:.2f}") or "void"


def seconds_to_first_step(cell: Result, label: str) -> str:
    """Return the seconds from a contestant's start to the end of its first step."""
    return spread_of(cell, label, "seconds_to_first_step", "{:.1f}")


def shipped_table(results: Results) -> str:
    """Return a table of the tools with their own defaults, "" if they were not measured."""
    cell = named(results, "shipped, medium")
    if not cell or not cell["runs"]:
        return ""
    lines = []
    for label in labels_of(cell):
        speed = spread_of(cell, label, "tokens_per_second", "{:,.0f}")
        lead = "" if label == "ours" else lead_as_shipped(cell, label)
        memory = values(cell, label, "memory.resident").values()
        lines.append(
            [
                name_of(cell, label),
                speed or f"void: {'; '.join(reasons_of(cell, label))}",
                lead,
                f"{statistics.median(memory):,.0f}" if memory else "",
                spread_of(cell, label, "held_out_loss", "{:.3f}"),
            ]
        )
    header = ["own defaults", "tokens/s without padding", "this recipe is faster by a factor of"]
    header += ["peak memory, MiB", "held-out loss"]
    return table(header, lines)


# ---- The file ----


def as_text(cells: Sequence[Result]) -> str:
    """Return the cells as JSON with one line per run, so that diffs are readable."""
    parts = []
    for cell in cells:
        facts = json.dumps({name: value for name, value in cell.items() if name != "runs"})
        runs = ",\n  ".join(json.dumps(run) for run in cell["runs"])
        parts.append(f'{facts[:-1]}, "runs": [\n  {runs}]}}')
    return '{"cells": [\n' + ",\n".join(parts) + "\n]}\n"
