# SPDX-License-Identifier: Apache-2.0
"""The rows of scripts/model_families.py as a table, without heavy imports."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proof.markdown import decimal, table

from .launches import KINDS

Row = dict[str, Any]

OK = "ok"
# Relative. A loss is a mean over some hundred tokens in fp32, which rounds to 6e-8.
BOUND = 1e-6
NOT_MEASURED = (
    "Not measured yet: "
    "`python scripts/model_families.py --warm --json results/model_families.json`."
)
HEADER = [
    "`model_type`",
    "attention",
    "own loss",
    "first loss differs by",
    "trained",
    "trained with LoRA",
    "adapters",
    "loaded differs by",
    "remarks",
]


def block(measured: Mapping[str, Any] | None) -> str:
    """Return what a page shows of a file of results: a sentence, the table, and the versions."""
    if measured is None:
        return NOT_MEASURED
    rows = measured["rows"]
    good = [row for row in rows if row["verdict"] == OK]
    counts = (
        f"{len(good)} of {len(rows)} families train as transformers would. Over all of their runs, "
        f"the first loss differs from the model's own by at most {largest_of_first(good)}, and the "
        f"loss of the loaded result from that of the trained model by at most "
        f"{largest_of_loaded(good)}."
    )
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    return "\n\n".join([counts, families_table(rows), f"Measured with {versions}."])


def largest_of_first(rows: Iterable[Row]) -> str:
    """Return the largest difference of a first loss from a model's own, over all runs."""
    return decimal(max(difference for row in rows for difference in first_differences(row)))


def largest_of_loaded(rows: Iterable[Row]) -> str:
    """Return the largest difference of a loaded result from what was trained, over all runs."""
    return decimal(max(difference for row in rows for difference in loaded_differences(row)))


def families_table(rows: Iterable[Row]) -> str:
    """Return one line for each family, in the order of their names; those that fail come last."""
    in_order = sorted(rows, key=lambda row: (row["verdict"] != OK, row["family"]))
    return table(HEADER, [cells_of(row) for row in in_order])


def cells_of(row: Row) -> list[str]:
    """Return the cells of a family's line; those of runs that failed are empty."""
    lora = row.get("LoRA", {})
    return [
        f"`{row['family']}`",
        row.get("attention", ""),
        number(row.get("own_loss")),
        largest(first_differences(row)),
        number(row.get("full", {}).get("trained")),
        number(lora.get("trained")),
        str(lora.get("adapters", "")),
        largest(loaded_differences(row)),
        "; ".join(remarks(row)),
    ]


def first_differences(row: Row) -> list[float]:
    """Return for each run how much its first loss differs from the model's own."""
    runs = [row[kind] for kind in KINDS if kind in row]
    return [relative(run["losses"][0], row["own_loss"]) for run in runs]


def loaded_differences(row: Row) -> list[float]:
    """Return for each run how much the loss of what it wrote differs from what it trained."""
    runs = [row[kind] for kind in KINDS if kind in row]
    return [relative(run["loaded"], run["trained"]) for run in runs]


def remarks(row: Row) -> list[str]:
    """Return what else is to be known of a family: its router's loss, and what is wrong."""
    found = []
    if row.get("router_loss"):
        found.append(f"router's loss, not trained on: {row['router_loss']:.4f}")
    for problem in row["problems"]:
        found.append(problem.replace("|", "/"))
    return found


def relative(ours: float, theirs: float) -> float:
    """Return the relative difference of two losses; NaN if one of them is."""
    return abs(ours - theirs) / abs(theirs)


def number(loss: float | None) -> str:
    """Return a loss as a cell, empty where there is none."""
    return "" if loss is None else f"{loss:.4f}"


def largest(differences: Sequence[float]) -> str:
    """Return the largest difference as a cell, empty where there is none."""
    return decimal(max(differences)) if differences else ""
