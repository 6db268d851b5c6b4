# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of the results of evidence/gpu_proof.py, from the records under results/gpu/."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from proof.markdown import table

from .catalog import CELLS
from .cell import FAILED, MEASURED, NOT_OK, OK, SKIPPED, TIMED_OUT, Row
from .runner import Record

GIB = 2**30
# The jobs that several programs are given, by their cell
JOBS = {
    "speed.8b_lora": "8B LoRA, 2 rows of 4,096 tokens",
    "speed.8b_full": "8B full, 4 rows of 4,096 tokens",
    "speed.8b_qlora": "8B QLoRA, 2 rows of 2,048 tokens",
    "speed.1b_full": "1B full, 4 rows of 4,096 tokens",
}
# The figures of speed_block in their order, and how each is written
STYLES = {
    "tokens/s": "{:,}",
    "allocated, GiB": "{:.2f}",
    "planned, GiB": "{:.2f}",
    "MFU": "{:.1%}",
}
NOT_MEASURED = "Not measured yet: no results of a GPU are in `results/gpu/`."
FIELDS = ("cell", "proves", "bound", "verdict", "rows", "device", "driver", "versions", "commit")
PLAIN = {
    OK: "yes",
    NOT_OK: "**no**",
    MEASURED: "measured",
    SKIPPED: "skipped",
    FAILED: "**failed**",
    TIMED_OUT: "**no time**",
}


def read_records(folder: Path) -> list[Record]:
    """Return the records of a folder in the order of the cells; [] if it is missing or empty.

    Raises ValueError for a file that is not a record, and for one that was made with --tiny, whose
    figures would be mistaken for those of real shapes.
    """
    records = []
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text())
        missing = [name for name in FIELDS if name not in record]
        if missing:
            raise ValueError(
                f"{path}: not a record of gpu_proof.py, it has no {', '.join(missing)}"
            )
        if record["tiny"]:
            raise ValueError(f"{path}: made with --tiny, whose figures mean nothing; remove it")
        records.append(record)
    order = {cell.name: number for number, cell in enumerate(CELLS)}
    return sorted(records, key=lambda record: order.get(record["cell"], len(order)))


def machine_of(record: Record) -> str:
    """Return device, driver and versions of a record as one line, without the commit."""
    parts = [record["device"]]
    if record["driver"]:
        parts.append(f"driver {record['driver']}")
    for name, version in record["versions"].items():
        if version:
            parts.append(f"{name} {version}")
    return ", ".join(parts)


def machines_of(records: Sequence[Record]) -> str:
    """Return a sentence that names each machine that records come from, with its commits."""
    commits: dict[str, list[str]] = {}
    for record in records:
        of_machine = commits.setdefault(machine_of(record), [])
        commit = record["commit"] or "unknown"
        if commit not in of_machine:
            of_machine.append(commit)
    machines = []
    for name, found in commits.items():
        noun = "commits" if len(found) > 1 else "commit"
        machines.append(f"{name}, {noun} {' and '.join(found)}")
    return "Measured on " + "; and on ".join(machines) + "."


def text_of(value: Any) -> str:
    """Return a value of a record as text for a table."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value:,}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def block(records: Sequence[Record]) -> str:
    """Return the table of README.md: each cell's claim, bound and verdict."""
    if not records:
        return NOT_MEASURED
    lines = []
    for record in records:
        verdict = PLAIN[record["verdict"]]
        if record["verdict"] == SKIPPED:
            verdict += f" ({text_of(record['error'])})"
        lines.append([f"`{record['cell']}`", record["proves"], record["bound"], verdict])
    text = table(["cell", "claim", "bound", "holds"], lines)
    return f"{machines_of(records)}\n\n{text}"


def speed_block(records: Sequence[Record]) -> str:
    """Return the table of speed and of tensors at the peak, without runs that have no figures."""
    lines = []
    for record in records:
        job = JOBS.get(record["cell"])
        if job is None:
            continue
        for row in record["rows"]:
            if "tokens/s" not in row or "allocated, GiB" not in row:
                continue
            figures = {
                name: style.format(row[name]) for name, style in STYLES.items() if name in row
            }
            lines.append([job, row["what"], *(figures.get(name, "") for name in STYLES)])
    if not lines:
        return NOT_MEASURED
    header = ["job", "program", "tokens/s", "peak, GiB", "planned, GiB", "MFU"]
    return table(header, lines)


def plan_block(records: Sequence[Record]) -> str:
    """Return the table of planned and measured tensors at the peak of each run."""
    lines = []
    for record in records:
        for row in record["rows"]:
            if "planned, GiB" in row and "allocated, GiB" in row:
                job = JOBS[record["cell"]]
                lines.append(plan_line(job, row["planned, GiB"], row["allocated, GiB"]))
            elif "planned tensors" in row and "allocated" in row:
                run = f"`{row['run']}`"
                planned = row["planned tensors"] / GIB
                lines.append(plan_line(run, planned, row["allocated"] / GIB))
    if not lines:
        return NOT_MEASURED
    return table(["run", "planned, GiB", "measured, GiB", "error"], lines)


def plan_line(run: str, planned: float, measured: float) -> list[str]:
    """Return one line of the table of plans, of figures in GiB."""
    error = round(planned / measured - 1, 3) + 0.0  # so that it is never -0.0
    return [run, f"{planned:.2f}", f"{measured:.2f}", f"{error:+.1%}"]


def rows_table(rows: Sequence[Row]) -> str:
    """Return the rows of one record as a table; columns in the order of their first row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [[text_of(row.get(name)) for name in columns] for row in rows]
    return table(columns, lines)


def details(records: Sequence[Record]) -> str:
    """Return the section of results/README.md: every record with its numbers and commands."""
    if not records:
        return NOT_MEASURED
    parts = [machines_of(records)]
    for record in records:
        parts.append(f"## {record['cell']}")
        parts.append(claim_of(record))
        if record["error"]:
            parts.append(f"```\n{record['error']}\n```")
        if record["rows"]:
            parts.append(rows_table(record["rows"]))
        commands = "\n".join(command for command in record["commands"] if command)
        if commands:
            parts.append(f"```\n{commands}\n```")
    return "\n\n".join(parts)


def claim_of(record: Record) -> str:
    """Return a record's claim, bound and verdict as sentences, with what to know of its figures."""
    bound = f" Bound: {record['bound']}." if record["bound"] else ""
    verdict = PLAIN[record["verdict"]]
    text = f"Claim: {record['proves']}.{bound} Holds: {verdict}"
    if record["seconds"] is not None:
        text += f" ({record['seconds']:.0f} s)"
    text += "."
    if record.get("shares_gpu"):
        text += " It shared the GPU with other cells, so that its seconds mean nothing."
    if record.get("note"):
        text += f" {record['note']}"
    return text
