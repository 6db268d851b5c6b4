# SPDX-License-Identifier: Apache-2.0
"""The tables of speed, of quickstarts, and of what was measured on a GPU, from results/.

`BLOCKS` has a function for each, by the name of its marks in the documents. A ratio is taken within
a repeat, between processes that ran one after the other. Tables show the median of these ratios,
never the ratio of two means, which one slow minute of the machine would distort.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from jobs import RECIPES

RESULTS = Path(__file__).resolve().parents[1] / "results"
NAMES = {
    "floor": "plain PyTorch loop",
    "lean": "plain loop without unneeded logits",
    "ours": "this recipe",
    "trainer": "Trainer",
    "trl": "SFTTrainer",
    "trl packed": "SFTTrainer",
}
GPU_JOBS = {
    "speed.8b_lora": "8B LoRA, 2 rows of 4,096 tokens",
    "speed.8b_full": "8B full, 4 rows of 4,096 tokens",
    "speed.8b_qlora": "8B QLoRA, 2 rows of 2,048 tokens",
}
GPU_FIGURES = {
    "tokens/s": "{:,}",
    "allocated, GiB": "{:.2f}",
    "planned, GiB": "{:.2f}",
    "MFU": "{:.1%}",
}
HOLDS = {True: "yes", False: "**no**", None: "measured", "no time": "**no time**"}
GIB = 2**30

Row = dict[str, Any]  # facts of one measurement, as `record` keeps them


def rows_of(name: str) -> list[Row]:
    """Return the rows of results/NAME.json in the order of the file; [] without that file."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    return list(json.loads(path.read_text()).values())


def table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Return an aligned Markdown table. Every line has as many cells as the header."""
    rows = [list(map(str, line)) for line in (header, *lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    padded = [" | ".join(map(str.ljust, cells, widths)) for cells in rows]
    return "\n".join(f"| {line} |" for line in padded)


# ---- Figures of runs ----
def cell_of(name: str) -> Row:
    """Return the row of a job of results/speed.json by its name. Raises StopIteration without."""
    return next(row for row in rows_of("speed") if row["cell"] == name)


def labels_of(cell: Row) -> list[str]:
    """Return the labels of a job's contestants, in the order of their runs."""
    return list(dict.fromkeys(run["contestant"] for run in cell["runs"]))


def name_of(cell: Row, label: str) -> str:
    """Return the name of a contestant in a table."""
    if cell["flags"][label].get("packing", False):
        return f"{NAMES[label]}, --packing"
    return NAMES[label]


def values(cell: Row, label: str, key: str) -> dict[int, float]:
    """Return a number of each run of a contestant that is not void, by repeat."""
    found = {}
    for run in cell["runs"]:
        if run["contestant"] == label and not run["void"] and key in run:
            found[run["repeat"]] = run[key]
    return found


def ratio(number: float, reference: float) -> float:
    """Return how many times the reference a number is."""
    return number / reference


def milliseconds_more(seconds: float, reference: float) -> float:
    """Return how many milliseconds a time is above the reference, both in seconds."""
    return 1e3 * (seconds - reference)


def paired(
    cell: Row,
    label: str,
    other: str,
    key: str = "seconds_per_step",
    of: Callable[[float, float], float] = ratio,
) -> list[float]:
    """Return `of` a number of `label` and of `other`, for each repeat in which both count."""
    ours = values(cell, label, key)
    theirs = values(cell, other, key)
    return [of(ours[repeat], theirs[repeat]) for repeat in sorted(ours.keys() & theirs.keys())]


def spread(numbers: Sequence[float], form: str = "{:.2f}") -> str:
    """Return the median of some numbers and their range, as text; "" without numbers."""
    if not numbers:
        return ""
    middle = form.format(statistics.median(numbers))
    low = form.format(min(numbers))
    high = form.format(max(numbers))
    if low == high:
        return middle
    return f"{middle} ({low} to {high})"


def spread_of(cell: Row, label: str, key: str, form: str) -> str:
    """Return the spread of a number over a contestant's runs."""
    return spread(list(values(cell, label, key).values()), form)


# ---- Blocks ----
def speed() -> str:
    """Return the tables of the same batches, and of each tool's own defaults."""
    tools = ("lean", "ours", "trainer", "trl")
    medium = cell_of("matched, medium")
    nothing = cell_of("matched, near zero")
    times = [spread(paired(medium, tool, "floor"), "{:.3f}") for tool in tools]
    more = [spread(paired(nothing, tool, "floor", of=milliseconds_more)) for tool in tools]
    lines = [
        ["36M parameters, 2 rows: step time relative to the plain loop", *times],
        ["almost no compute: extra ms per step over the plain loop", *more],
    ]
    for cache in ("cold", "warm"):
        cell = cell_of(f"start, {cache} cache")
        seconds = [spread_of(cell, tool, "seconds_to_first_step", "{:.1f}") for tool in tools]
        lines.append([f"seconds until the first step ends, {cache} data cache", *seconds])
    matched = table(["same batches, same losses", *(NAMES[tool] for tool in tools)], lines)

    cell = cell_of("shipped, medium")
    lines = []
    for label in labels_of(cell):
        lead = "" if label == "ours" else spread(paired(cell, "ours", label, "tokens_per_second"))
        counted = [run for run in cell["runs"] if run["contestant"] == label and not run["void"]]
        memory = statistics.median(run["memory_mib"]["resident"] for run in counted)
        speed_there = spread_of(cell, label, "tokens_per_second", "{:,.0f}")
        loss = spread_of(cell, label, "held_out_loss", "{:.3f}")
        lines.append([name_of(cell, label), speed_there, lead, f"{memory:,.0f}", loss])
    header = ["own defaults", "tokens/s without padding", "this recipe is faster by a factor of"]
    header += ["peak memory, MiB", "held-out loss"]
    return f"{matched}\n\n{table(header, lines)}"


def quickstarts() -> str:
    """Return the table of quickstarts: a number of held-out rows before and after, and seconds."""
    rows = sorted(rows_of("quickstarts"), key=lambda row: list(RECIPES).index(row["recipe"]))
    lines = []
    for row in rows:
        command = f"`make quickstart RECIPE={row['recipe']}`"
        figures = [f"{row['before']:.3g}", f"{row['after']:.3g}", f"{row['seconds']:.0f}"]
        lines.append([command, row["shown"], *figures])
    seconds = f"seconds, {rows[0]['cores']} CPU cores"
    return table(["quickstart", "on held-out rows", "before", "after", seconds], lines)


def gpu_cells() -> list[Row]:
    """Return the rows of results/gpu/ by the names of their cells."""
    rows = [row for path in RESULTS.glob("gpu/*.json") for row in rows_of(f"gpu/{path.stem}")]
    return sorted(rows, key=lambda row: row["cell"])


def gpu() -> str:
    """Return each claim about a GPU with its bound and whether it holds, and the machines."""
    commits: dict[str, list[str]] = {}
    lines = []
    for row in gpu_cells():
        versions = [f"{name} {version}" for name, version in row["versions"].items() if version]
        machine = ", ".join([row["device"], f"driver {row['driver']}", *versions])
        of_machine = commits.setdefault(machine, [])
        if row["commit"] not in of_machine:
            of_machine.append(row["commit"])
        lines.append([f"`{row['cell']}`", row["proves"], row["bound"], HOLDS[row["holds"]]])
    machines = []
    for name, found in commits.items():
        noun = "commits" if len(found) > 1 else "commit"
        machines.append(f"{name}, {noun} {' and '.join(found)}")
    text = "Measured on " + "; and on ".join(machines) + "."
    return f"{text}\n\n{table(['cell', 'claim', 'bound', 'holds'], lines)}"


def gpu_speed() -> str:
    """Return the table of speed and of tensors at the peak beside other programs."""
    lines = []
    for cell in gpu_cells():
        for row in cell["rows"]:
            if cell["cell"] in GPU_JOBS and "tokens/s" in row:
                figures = [
                    form.format(row[name]) if name in row else ""
                    for name, form in GPU_FIGURES.items()
                ]
                lines.append([GPU_JOBS[cell["cell"]], row["what"], *figures])
    header = ["job", "program", "tokens/s", "peak, GiB", "planned, GiB", "MFU"]
    return table(header, lines)


def gpu_plan() -> str:
    """Return the table of planned and measured tensors at the peak of each run."""
    lines = []
    for cell in gpu_cells():
        for row in cell["rows"]:
            if "planned, GiB" in row and "allocated, GiB" in row:
                run = GPU_JOBS[cell["cell"]]
                planned = row["planned, GiB"]
                measured = row["allocated, GiB"]
            elif "planned tensors" in row and "allocated" in row:
                run = f"`{row['run']}`"
                planned = row["planned tensors"] / GIB
                measured = row["allocated"] / GIB
            else:
                continue
            error = round(planned / measured - 1, 3) + 0.0  # so that it is never -0.0
            lines.append([run, f"{planned:.2f}", f"{measured:.2f}", f"{error:+.1%}"])
    return table(["run", "planned, GiB", "measured, GiB", "error"], lines)


BLOCKS = {
    "quickstarts": quickstarts,
    "speed": speed,
    "gpu": gpu,
    "gpu_speed": gpu_speed,
    "gpu_plan": gpu_plan,
}
