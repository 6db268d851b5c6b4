# SPDX-License-Identifier: Apache-2.0
"""The rows of evidence/parity.py, one per run, and their tables."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from exits import Exit
from paths import ROOT
from proof.compare import BOUNDS, NAMES, bounds_of, compare, within
from proof.jobs import WEIGHTS, Run, all_runs, is_refused
from proof.launch import launch
from proof.markdown import table

HEADER = [
    "YAML",
    "weights and flags",
    "ranks x batch x accumulation",
    *NAMES.values(),
    "bytes",
    "verdict",
]
FEW_NAMES = 3  # YAML files that are named one by one when a bound is explained
ERROR = "error: "  # start of the line in which a recipe says why it does not run


def measure(run: Run, tiny: Path, folder: Path, reference: Path, root: Path = ROOT) -> dict:
    """Launch one run, compare it with the finished run in `reference`, and return its row.

    Args:
        tiny: the folder with its model and rows.
        root: the checkout whose recipe, YAML and scripts are launched.
    """
    code, output = launch(run, tiny, folder, root)
    row = dataclasses.asdict(run) | {"exit_code": code}
    errors = [line for line in output.splitlines() if line.startswith(ERROR)]
    if code == Exit.USAGE and is_refused(run) and errors:
        return row | {"verdict": "refused", "reason": errors[0].removeprefix(ERROR)}
    if code or is_refused(run):
        return row | {"verdict": "FAILED", "reason": output[-1000:]}
    try:
        return row | judged(run, folder, reference)
    except (OSError, ValueError) as error:  # different tensors or steps, or a failed reference
        return row | {"verdict": "FAILED", "reason": str(error)}


def judged(run: Run, folder: Path, reference: Path) -> dict:
    """Return the fields of a finished run's row: its numbers and the bytes that its ranks held."""
    report = json.loads((folder / "report.json").read_text())
    measured = {
        "differences": compare(folder, reference),
        "bytes": report["verdict"],
        "held": held_bytes(report["rows"]),
    }
    return measured | verdict_on(run, measured)


def verdict_on(run: Run, measured: dict) -> dict:
    """Return the bounds of a run, the reason for them, and whether it is within them.

    Args:
        measured: at least its differences and its verdict on bytes.
    """
    bounds, why = bounds_of(run)
    ok = within(measured["differences"], bounds) and measured["bytes"] == "ok"
    return {"bounds": bounds, "why": why, "verdict": "ok" if ok else "OUT OF BOUNDS"}


def held_bytes(rows: list[dict]) -> dict[str, dict]:
    """Return each class's [held, promised] bytes of each rank, and its number of shards."""
    classes = {}
    for row in rows:
        name = row["class"]
        if name not in classes:
            classes[name] = {"shards": row["shards"], "dtypes": row["dtypes"], "ranks": []}
        classes[name]["ranks"].append([row["held_bytes"], row["promised_bytes"]])
    return classes


def merge(measured: list[dict], before: list[dict], chosen: list[Run]) -> list[dict]:
    """Return in order the new rows, and the earlier rows of other runs.

    Rows of runs that are made no longer are left out, and the others are judged by the bounds of
    today. Runs that were only measured because others are compared with them have a row from
    before.

    Args:
        chosen: the runs that the command line chooses.
    """
    others = set(all_runs()) - set(chosen)
    kept = [judged_again(row) for row in before if run_of(row) in others]
    if kept:
        measured = [row for row in measured if run_of(row) in chosen]
    return in_order(measured + kept)


def judged_again(row: dict) -> dict:
    """Return a row with the bounds of today, if its run was compared with another one."""
    if "differences" not in row:
        return row
    return row | verdict_on(run_of(row), row)


def run_of(row: dict) -> Run:
    """Return the run that a row is about."""
    settings: dict[str, Any] = {"sizes": []}  # Older rows have none.
    for field in dataclasses.fields(Run):
        if field.name in row:
            settings[field.name] = row[field.name]
    for name in ("flags", "sizes"):
        settings[name] = tuple(settings[name])
    return Run(**settings)


def in_order(rows: list[dict]) -> list[dict]:
    """Return the rows in the order of the tables: strategies first, fewer ranks before more."""
    return sorted(rows, key=place_of)


def place_of(row: dict) -> tuple:
    """Return the sort key of a row."""
    more_ranks = row["ranks"] > 2 and "hybrid" not in row["config"]  # a mesh of 2 x 2 needs four
    weights = list(WEIGHTS).index(row["weights"])
    return row["group"] != "strategies", row["group"], weights, more_ranks


def tables(rows: list[dict]) -> str:
    """Return all rows, one Markdown table per group, with the bounds below."""
    parts = []
    for group in dict.fromkeys(row["group"] for row in rows):
        chosen = [row for row in rows if row["group"] == group]
        names_recipes = len({row["recipe"] for row in chosen}) > 1
        lines = [cells_of(row, names_recipes) for row in chosen]
        parts.append(f"## {group}\n\n{table(HEADER, lines)}")
    bounds = ", ".join(f"{NAMES[name]} {bound:.0e}" for name, bound in BOUNDS.items())
    return "\n\n".join([*parts, "\n".join([f"Bounds: {bounds}.", *reasons(rows)])])


def cells_of(row: dict, names_recipe: bool) -> list[str]:
    """Return the cells of one row's line in its table."""
    run = run_of(row)
    words = [run.weights, *run.flags, *run.sizes]
    if run.layers != Run.layers:
        words.append(f"{run.layers} layers")
    if names_recipe:
        words.insert(0, f"{row['recipe']}.py")
    return [
        f"{row['config']}.yaml",
        " ".join(words),
        f"{row['ranks']} x {row['batch']} x {row['accumulation']}",
        *(shown(row.get("differences", {}).get(key)) for key in BOUNDS),
        row.get("bytes", ""),
        row["verdict"],
    ]


def shown(difference: float | None) -> str:
    """Return a difference as a cell of a table, empty where it is not reported."""
    return "" if difference is None else f"{difference:.1e}"


def reasons(rows: list[dict]) -> list[str]:
    """Return lines of text on bounds other than `BOUNDS`: where they apply, and why."""
    places_of = {}
    for row in rows:
        for reason, where in reasons_of(row).items():
            places = places_of.setdefault(reason, [])
            if where not in places:
                places.append(where)
    lines = []
    for reason, places in places_of.items():
        where = ", ".join(places) if len(places) <= FEW_NAMES else "full weights, sharded"
        lines.append(f"- {where}: {reason}.")
    return lines


def reasons_of(row: dict) -> dict[str, str]:
    """Return {reason for a bound of one row that is not in `BOUNDS`: where it applies}."""
    bounds = row.get("bounds", {})
    if not bounds:
        return {}
    if row["precision"] != "no":
        words = [f"{NAMES[name]} {bound:.0e}" for name, bound in bounds.items() if bound]
        return {f"bounds are {', '.join(words)}. {row['why']}": row["precision"]}
    reasons = {}
    for name, bound in bounds.items():
        if bound != BOUNDS[name]:
            what = "not reported" if bound is None else f"within {bound:.0e}"
            reasons[f"{NAMES[name]} {what}. {row['why']}"] = f"`{row['config']}.yaml`"
    return reasons
