# SPDX-License-Identifier: Apache-2.0
"""Numbers of a measured cell: of its valid runs, and ratios between contestants.

A ratio is taken within a repeat, between processes that ran one after the other. Tables show the
median of these ratios, never the ratio of two means, which one slow minute of the machine would
distort. Ranges are over the repeats.
"""

import statistics
from collections.abc import Callable, Sequence

from .cells import Result, Results

NAMES = {
    "floor": "plain PyTorch loop",
    "lean": "plain loop without unneeded logits",
    "ours": "this recipe",
    "trainer": "Trainer",
    "trl": "SFTTrainer",
    "trl packed": "SFTTrainer",
}


def named(results: Results, name: str) -> Result | None:
    """Return a cell of the results by its name, or None."""
    for cell in results["cells"]:
        if cell["cell"] == name:
            return cell
    return None


def labels_of(cell: Result) -> list[str]:
    """Return the labels of a cell's contestants, in the order of their runs."""
    return list(dict.fromkeys(run["contestant"] for run in cell["runs"]))


def name_of(cell: Result, label: str) -> str:
    """Return the name of a contestant of a cell in a table."""
    name = NAMES.get(label, label)
    if cell["flags"][label].get("packing", False):
        name += ", --packing"
    return name


def reasons_of(cell: Result, label: str) -> list[str]:
    """Return why runs of a contestant are not valid, each reason once."""
    reasons = []
    for run in cell["runs"]:
        reason = run["void"]
        if run["contestant"] == label and reason and reason not in reasons:
            reasons.append(reason)
    return reasons


def values(cell: Result, label: str, key: str) -> dict[int, float]:
    """Return a number of each valid run of a contestant, by repeat.

    key: of a run, or "memory.NAME" for one of its peaks.
    """
    found = {}
    for run in cell["runs"]:
        if run["contestant"] != label or run["void"]:
            continue
        if key.startswith("memory."):
            number = run.get("memory_mib", {}).get(key.removeprefix("memory."))
        else:
            number = run.get(key)
        if number is not None:
            found[run["repeat"]] = number
    return found


def ratio(number: float, reference: float) -> float:
    """Return how many times the reference a number is."""
    return number / reference


def milliseconds_more(seconds: float, reference: float) -> float:
    """Return how many milliseconds a time is above the reference, both in seconds."""
    return 1e3 * (seconds - reference)


def paired(
    cell: Result,
    label: str,
    other: str,
    key: str = "seconds_per_step",
    of: Callable[[float, float], float] = ratio,
) -> list[float]:
    """Return `of` a number of `label` and of `other`, for each repeat in which both are valid."""
    ours = values(cell, label, key)
    theirs = values(cell, other, key)
    repeats = sorted(ours.keys() & theirs.keys())
    return [of(ours[repeat], theirs[repeat]) for repeat in repeats]


def spread(numbers: Sequence[float], form: str = "{:.2f}") -> str:
    """Return the median of some numbers and their range, as text; "" without numbers."""
    if not numbers:
        return ""
    middle = form.format(statistics.median(numbers))
    low = form.format(min(numbers))
    high = form.format(max(numbers))
    return middle if low == high else f"{middle} ({low} to {high})"


def spread_of(cell: Result, label: str, key: str, form: str = "{:.2f}") -> str:
    """Return the spread of a number over a contestant's valid runs."""
    return spread(list(values(cell, label, key).values()), form)
