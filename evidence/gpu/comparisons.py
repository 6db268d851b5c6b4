# SPDX-License-Identifier: Apache-2.0
"""Rows of tables about launches, and the differences between two runs."""

from collections.abc import Sequence
from typing import Any

from .cell import Outcome, Row
from .launches import Trained

LOSS_BOUND = 2e-2  # relative, over 20 steps: bf16 keeps eight bits, TF32 and fp16 eleven


def row_of(trained: Trained) -> Row:
    """Return the columns that every table of launches has."""
    row: Row = {"what": trained.variant.name}
    if trained.why or not trained.steps:
        return row | {"result": trained.why}
    return row | {
        "result": "trained",
        "first loss": round(trained.losses[0], 4),
        "last loss": round(trained.losses[-1], 4),
        "peak GiB": round(trained.peak_gib, 3),
        "seconds": round(trained.seconds, 1),
    }


def has_failed(trained: Trained) -> bool:
    """Return whether a launch failed to train; one that was left out has not failed."""
    return not trained.succeeded and not trained.why.startswith("left out")


def add_row(outcome: Outcome, row: Row, trained: Trained) -> None:
    """Add the row of a launch to an outcome, which does not hold if the launch failed."""
    outcome.require(not has_failed(trained))
    outcome.rows.append(row)
    outcome.commands.append(trained.command)


def compare(
    outcome: Outcome, trained: Sequence[Trained], reference: Trained, bound: float = LOSS_BOUND
) -> None:
    """Add a row for each launch, with its largest difference from the reference's losses.

    The outcome holds if every difference is within the bound, and no launch failed.
    """
    for one in trained:
        row = row_of(one)
        if one.succeeded:
            difference = largest_difference(one.steps, reference.steps)
            row["from the first, relative"] = difference
            outcome.require(difference <= bound)
        add_row(outcome, row, one)


def largest_difference(
    steps: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]
) -> float:
    """Return the largest relative difference in the loss of two runs, step by step.

    The steps are those that the first run logged. The result is infinite if there are none, if the
    reference ends at another step or lacks one, or if a loss is not finite.
    """
    if not steps or not reference or steps[-1]["step"] != reference[-1]["step"]:
        return float("inf")
    reference_losses = {line["step"]: line["loss"] for line in reference}
    largest = 0.0
    for line in steps:
        loss = line["loss"]
        wanted = reference_losses.get(line["step"])
        if wanted is None or loss is None:
            return float("inf")
        largest = max(largest, abs(loss / wanted - 1))
    return largest


def falls(losses: Sequence[float | None]) -> bool:
    """Return whether the mean of the last losses is below that of the first ones."""
    finite = [loss for loss in losses if loss is not None]
    if len(losses) < 2 or len(finite) < len(losses):
        return False
    few = max(1, min(3, len(finite) // 2))
    return sum(finite[-few:]) < sum(finite[:few])


def held_bytes(trained: Trained, kind: str) -> int:
    """Return the bytes of one kind that the process held, from the shard report.

    kind: "parameters", "gradients" or "optimizer".
    """
    report = trained.report or {}
    held = 0
    for row in report.get("rows", []):
        if row["class"] == kind and row["rank"] == 0:
            held += row["held_bytes"]
    return held
