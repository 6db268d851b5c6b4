# SPDX-License-Identifier: Apache-2.0
"""Values over the steps of a run."""

from collections.abc import Sequence
from dataclasses import dataclass

from plotting.runs import Line

PARTS = 20  # a value of a smoothed curve, or at an end of it, is a mean over one such part of a run


@dataclass(frozen=True)
class Curve:
    """Values over steps.

    Attributes:
        steps, values: of equal length.
    """

    steps: list[float]
    values: list[float]

    def smoothed(self) -> "Curve":
        """Return the curve of the moving averages."""
        return Curve(self.steps, smooth(self.values))

    def first(self) -> float:
        """Return the mean over the first twentieth of a curve that has values."""
        return mean(self.values[: self._part()])

    def last(self) -> float:
        """Return the mean over the last twentieth of a curve that has values.

        One step is a matter of luck.
        """
        return mean(self.values[-self._part() :])

    def _part(self) -> int:
        """Return how many values are a twentieth of them."""
        return max(1, len(self.values) // PARTS)


def curve_of(lines: Sequence[Line], name: str) -> Curve:
    """Return the curve of the lines that have a metric."""
    steps = []
    values = []
    for line in lines:
        if line.get(name) is not None:
            steps.append(line["step"])
            values.append(line[name])
    return Curve(steps, values)


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags.

    At both ends only the inner half of the window exists. It is not narrowed further, since the
    curve would then begin and end with the luck of a single step.
    """
    half = len(values) // (2 * PARTS)
    averages = []
    for i in range(len(values)):
        averages.append(mean(values[max(0, i - half) : i + half + 1]))
    return averages


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value; not finite if one of them is not."""
    return sum(values) / len(values)
