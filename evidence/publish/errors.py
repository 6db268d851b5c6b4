# SPDX-License-Identifier: Apache-2.0
"""How far the planner is off: errors of planned peaks, relative to what was measured."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

METHODS = ("closed form", "traced")


class Errors(NamedTuple):
    """The relative errors of several cells: their number, the mean size, and the extremes."""

    cells: int
    mean: float
    most_above: float
    most_below: float


def errors_of(rows: Sequence[Mapping[str, Any]], method: str) -> Errors:
    """Return the errors of one of METHODS over all rows that have one."""
    errors = [row[method] for row in rows if method in row]
    mean = sum(map(abs, errors)) / len(errors)
    return Errors(len(errors), mean, max(errors), min(errors))
