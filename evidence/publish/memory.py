# SPDX-License-Identifier: Apache-2.0
"""Tables of host memory, and of the errors of the memory planner."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from measured.accuracy import METHODS, errors_of
from proof.markdown import table

from .strategies import Results, Row, rank_of

GIB = 2**30
MIB = 2**20
PLANNED_BY = {"closed form": "formulas (default)", "traced": "tracer (`--simulate`)"}
NO_ACTIVATIONS = (
    "Not measured yet: `python evidence/activations.py --json results/activations.json`."
)
NO_HOST_MEMORY = (
    "Not measured yet: `python evidence/host_memory.py --json results/host_memory.json`."
)


@dataclass(frozen=True)
class Compared:
    """One kind of cells of evidence/validate_planner.py and track_ranks.py."""

    kind: str
    text: str  # what the plan is compared with
    methods: Sequence[str]  # methods of planning


COMPARED = (
    Compared("one thing", "one CPU process, one setting changed at a time", METHODS),
    Compared("drawn", "one CPU process, random settings", METHODS),
    Compared("ranks", "2 and 4 CPU processes, each with rows of its own", METHODS[:1]),
    Compared("meshes", "2 to 8 CPU processes that share rows (TP, CP, SP)", METHODS),
    Compared("experts", "2 and 4 CPU processes that share experts (EP)", METHODS),
    Compared("told", "the same, told how many tokens arrived at each", METHODS[:1]),
    Compared("pipelines", "2 and 4 CPU processes in pipelines (PP)", METHODS[:1]),
    Compared("shapes", "the tracer, 1B to 70B parameters, up to 1,024 GPUs", METHODS[:1]),
)


def host_memory_block(results: Results) -> str:
    """Return the table of host memory that each rank took to load a model and to resume, by YAML.

    The unit is the size of the model in fp32.
    """
    if "host_memory" not in results:
        return NO_HOST_MEMORY

    def place(row: Row) -> tuple[int, tuple[int, str]]:
        return row["ranks"], rank_of(row["config"])

    lines = []
    for row in sorted(results["host_memory"]["rows"], key=place):
        name = f"`{row['config']}.yaml`"
        loading = copies_text(row["loading"])
        resuming = copies_text(row.get("resuming", []))
        lines.append([name, str(row["ranks"]), loading, resuming])
    header = ["YAML", "ranks", "loading: model sizes, by rank", "resuming: the same"]
    return table(header, lines)


def copies_text(copies: Iterable[float]) -> str:
    """Return the copies of the model that each rank took."""
    return " ".join(f"{number:.2f}" for number in copies)


def activations_block(results: Results) -> str:
    """Return the table of what a rank's autograd keeps of a row, by the ranks that share it."""
    if "activations" not in results:
        return NO_ACTIVATIONS
    one, *groups = results["activations"]["rows"]
    lines = []
    for length, (whole,) in one["bytes"].items():
        cells = [f"{int(length):,}", f"{whole / MIB:.1f}"]
        for row in groups:
            kept = max(row["bytes"][length])
            cells.append(f"{kept / MIB:.1f} ({kept / whole:.1%})")
        lines.append(cells)
    names = [f"{row['kind'].upper()} {row['size']}" for row in groups]
    return table(["tokens of a row", "one process, MiB", *names], lines)


def planner_block(results: Results) -> str:
    """Return the table of errors of the planned peak, by what it is compared with."""
    cells = list(results["planner"]["cells"])
    for row in results["planner_ranks"]["rows"]:
        cells += cells_of_tracked(row)
    lines = []
    for compared in COMPARED:
        of_kind = [cell for cell in cells if cell["kind"] == compared.kind]
        for method in compared.methods:
            number, mean, above, below = errors_of(of_kind, method)
            errors = [f"{abs(error):.2%}" for error in (mean, max(above, 0), min(below, 0))]
            lines.append([PLANNED_BY[method], compared.text, str(number), *errors])
    header = ["planned by", "compared with", "jobs", "mean error", "most above", "most below"]
    return table(header, lines)


def cells_of_tracked(row: Row) -> list[Row]:
    """Return what a tracked job adds to the table of errors.

    A job whose plan was told where tokens arrived (`arrived`) is there with a plan that was not,
    as the planner makes it, too.
    """
    formulas, _ = METHODS
    kind = kind_of_tracked(row)
    if "arrived" not in row:
        return [row | {"kind": kind, formulas: row["beside_bucket"]}]
    told = row | {"kind": "told", formulas: row["error"]}
    return [row | {"kind": kind, formulas: row["even"]}, told]


def kind_of_tracked(row: Row) -> str:
    """Return what the ranks of a tracked job have in common, as COMPARED names it."""
    if "ep" in row:
        return "experts"
    if "pp" in row:
        return "pipelines"
    return "meshes" if "sizes" in row else "ranks"


def signed(error: float) -> str:
    """Return a relative error in percent, with its sign; zero is +0.00%."""
    return f"{round(error, 4) + 0:+.2%}"


def tracked_table(rows: Sequence[Row]) -> str:
    """Return the relative error of the peak on CPU ranks, by YAML and job."""
    jobs = list(dict.fromkeys(row["job"] for row in rows))
    errors = {}
    places = {}
    for row in rows:
        name = name_of_tracked(row)
        errors[name, row["job"]] = signed(row["beside_bucket"])
        places[name] = (rank_of(row["config"]), row["ranks"])
    lines = []
    for name in sorted(places, key=lambda name: places[name]):
        lines.append([name, *(errors.get((name, job), "") for job in jobs)])
    return table(["YAML", *jobs], lines)


def name_of_tracked(row: Row) -> str:
    """Return the YAML of a tracked job, with the sizes of its mesh that are not the YAML's."""
    if "sizes" not in row:
        return row["config"]
    sizes = [size.replace("_size=", " ") for size in row["sizes"]]
    if "ep" in row:
        sizes.append(f"ep {row['ep']}")
    if "pp" in row:
        sizes += [f"pp {row['pp']}", row["schedule"], *["sharded"] * row["shards_stages"]]
    return ", ".join([row["config"], f"{row['ranks']} ranks", *sizes])


def shapes_table(cells: Iterable[dict[str, Any]]) -> str:
    """Return the GiB traced and the closed form's relative error, by shape and strategy."""
    lines = []
    for cell in cells:
        if cell["kind"] != "shapes":
            continue
        engine = cell.get("engine", "one process")
        ranks = cell.get("ranks", 1)
        precision = cell.get("mixed_precision", "no")
        strategy = f"{engine}, {ranks} ranks, {precision}"
        flags = " ".join(cell["flags"])
        gib = cell["traced bytes"] / GIB
        error = signed(cell["closed form"])
        lines.append([cell["model"], strategy, flags, f"{gib:.2f}", error])
    return table(["parameters", "strategy", "flags", "GiB traced", "closed form"], lines)
