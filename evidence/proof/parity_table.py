# SPDX-License-Identifier: Apache-2.0
"""The rows of evidence/test_parity.py, one per run, and their tables."""

from job import WEIGHTS, Run
from proof.markdown import table
from test_parity import BOUNDS

NAMES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "weights": "final weights",
}

HEADER = [
    "YAML",
    "weights and flags",
    "ranks x batch x accumulation",
    *NAMES.values(),
    "bytes",
    "verdict",
]
FEW_NAMES = 3  # YAML files that are named one by one when a bound is explained


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
    words = [row["weights"], *row["flags"], *row["sizes"]]
    if row["layers"] != Run.layers:
        words.append(f"{row['layers']} layers")
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
