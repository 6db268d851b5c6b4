# SPDX-License-Identifier: Apache-2.0
"""The rows of evidence/test_families.py as a table, without heavy imports."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from proof.markdown import decimal, table

KINDS = ("full", "LoRA", "FSDP")

Row = dict[str, Any]

OK = "ok"
# Relative. A loss is a mean over some hundred tokens in fp32, which rounds to 6e-8.
BOUND = 1e-6
COMMAND = "pytest evidence/test_families.py --all"
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
    """Return what a page shows of a file of results: sentences, the table, and the versions."""
    if measured is None:
        return f"Not measured yet: `{COMMAND}`."
    rows = measured["rows"]
    versions = [f"{name} {version}" for name, version in measured["versions"].items()]
    measured_with = f"Measured with {', '.join(versions)}."
    return "\n\n".join([summary(rows), families_table(rows), measured_with])


def summary(rows: Sequence[Row]) -> str:
    """Return in sentences how many families are within the bounds, and the largest differences."""
    good = good_rows(rows)
    first = largest_of_first(good)
    loaded = largest_of_loaded(good)
    return (
        f"{len(good)} of {len(rows)} families train as transformers would. Over all of their runs, "
        f"the first loss differs from the model's own by at most {first}, and the loss of the "
        f"loaded result from that of the trained model by at most {loaded}."
    )


def good_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of families in which nothing is wrong."""
    return [row for row in rows if row["verdict"] == OK]


def largest_of_first(rows: Iterable[Row]) -> str:
    """Return the largest difference of a first loss from a model's own, over all runs."""
    return decimal(max(max(first_differences(row)) for row in rows))


def largest_of_loaded(rows: Iterable[Row]) -> str:
    """Return the largest difference of a loaded result from what was trained, over all runs."""
    return decimal(max(max(loaded_differences(row)) for row in rows))


def families_table(rows: Iterable[Row]) -> str:
    """Return one line for each family, in the order of their names; those that fail come last."""
    in_order = sorted(rows, key=place_of)
    return table(HEADER, [cells_of(row) for row in in_order])


def place_of(row: Row) -> tuple[bool, str]:
    """Return the sort key of a row."""
    return row["verdict"] != OK, row["family"]


def cells_of(row: Row) -> list[str]:
    """Return the cells of a family's line; those of runs that failed are empty."""
    full = row.get("full", {})
    lora = row.get("LoRA", {})
    adapters = lora.get("adapters", "")
    return [
        f"`{row['family']}`",
        row.get("attention", ""),
        number(row.get("own_loss")),
        largest(first_differences(row)),
        number(full.get("trained")),
        number(lora.get("trained")),
        str(adapters),
        largest(loaded_differences(row)),
        "; ".join(remarks(row)),
    ]


def runs_of(row: Row) -> list[Row]:
    """Return the runs of a family that did not fail."""
    return [row[kind] for kind in KINDS if kind in row]


def first_differences(row: Row) -> list[float]:
    """Return for each run how much its first loss differs from the model's own."""
    return [relative(run["losses"][0], row["own_loss"]) for run in runs_of(row)]


def loaded_differences(row: Row) -> list[float]:
    """Return for each run how much the loss of what it wrote differs from what it trained."""
    return [relative(run["loaded"], run["trained"]) for run in runs_of(row)]


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
