# SPDX-License-Identifier: Apache-2.0
"""Which runs are valid: those that trained as the bare loop did."""

import math
from collections.abc import Sequence

from .cells import Run

# Largest difference of a step's loss from the bare loop's, in nats, by the dtype of the matmuls
CURVE = {"float32": 1e-5, "bfloat16": 1e-2}
HELD_OUT = 0.02  # largest relative difference of the loss on held-out rows from the bare loop's

# The difference of a run from the bare loop, or None if unknown, and why the run is void, or ""
Verdict = tuple[float | None, str]


def judge(runs: Sequence[Run], kind: str, dtype: str = "float32") -> list[Run]:
    """Return the runs, each with its difference from the bare loop of its repeat and its verdict.

    Each has `difference`, and `void`: why it is not valid, or "". The losses of the steps, which
    decide that, are left out.

    kind and dtype: the cell's.
    """
    floors = {run["repeat"]: run for run in runs if run["contestant"] == "floor"}
    judged = []
    for run in runs:
        difference, why = verdict(run, floors.get(run["repeat"], {}), kind, dtype)
        if not why and run.get("loaded"):
            why = "loaded"
        kept = {name: value for name, value in run.items() if name != "losses"}
        judged.append(kept | {"difference": difference, "void": why})
    return judged


def verdict(run: Run, floor: Run, kind: str, dtype: str) -> Verdict:
    """Return the verdict on one run by the gate of its cell's kind.

    floor: the run of the bare loop in the same repeat, {} if there is none.
    """
    if "failed" in run:
        return None, "failed"
    if kind == "shipped":
        return held_out_gate(run, floor)
    if kind == "growth":
        return finite_gate(run)
    return curve_gate(run, floor, CURVE[dtype])


def finite_gate(run: Run) -> Verdict:
    """Return the verdict on a run that is not compared with others."""
    if all(loss is not None and math.isfinite(loss) for loss in run["losses"]):
        return None, ""
    return None, "loss not finite"


def curve_gate(run: Run, floor: Run, bound: float) -> Verdict:
    """Return the largest difference of a step's loss from the floor's, in nats, and the verdict."""
    ours = run["losses"]
    theirs = floor.get("losses") or []
    if len(ours) != len(theirs) or None in ours:
        return None, f"{len(ours)} losses, the bare loop has {len(theirs)}"
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    if not all(map(math.isfinite, differences)):  # max would ignore a NaN
        return None, "loss not finite"
    largest = max(differences)
    why = "" if largest <= bound else f"loss differs by {largest:.1e}"
    return largest, why


def held_out_gate(run: Run, floor: Run) -> Verdict:
    """Return the relative difference of the held-out loss from the floor's, and the verdict."""
    if "held_out_loss" not in floor:
        return None, "the bare loop failed"
    difference = abs(run["held_out_loss"] / floor["held_out_loss"] - 1)
    why = "" if difference <= HELD_OUT else f"held-out loss differs by {difference:.1%}"
    return difference, why
