# SPDX-License-Identifier: Apache-2.0
"""A metric of a task: its value, its standard error, and how it differs from another model's.

Two models are asked the same rows. So the error of their difference is that of the differences of
the rows, which is smaller than the errors of both suggest: rows that are hard for one are hard for
the other.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NO_FILTER = "none"
WEIGHTED = ("loss", "perplexity")  # metrics of evaluation.own_rows whose rows count by their tokens
NOT_METRICS = ("name", "alias", "sample_len", "sample_count")
CLOSE = 1e-9  # between a value and the mean of its rows, relative to the value


@dataclass(frozen=True)
class Figure:
    """A metric of a task for one model.

    Attributes:
        metric: with the name of the filter of the answers, if there is one.
        stderr: None where there is none.
        num_rows: None for a group of tasks.
        higher_is_better: None if unknown.
        residuals: of each row, by how much it moves the value from what it is for the other rows,
            times the number of rows; None for values that are no means.
    """

    task: str
    metric: str
    value: float
    stderr: float | None
    num_rows: int | None
    higher_is_better: bool | None
    residuals: Sequence[float] | None = None

    @property
    def key(self) -> tuple[str, str]:
        """Return what names the figure among those of a model."""
        return self.task, self.metric

    def difference_from(self, before: "Figure") -> tuple[float, float | None]:
        """Return how much larger the value is than that of another model, and the error of that."""
        gap = self.value - before.value
        ours = self.residuals
        theirs = before.residuals
        if ours is None or theirs is None or len(ours) != len(theirs):
            return gap, None
        return gap, error_of([a - b for a, b in zip(ours, theirs, strict=True)])


def read_figures(results: Mapping[str, Any]) -> list[Figure]:
    """Return the figures of all tasks and groups of what lm-eval's evaluate returns."""
    figures = []
    for task, metrics in results["results"].items():
        for name, filter_name, value in metrics_of(metrics):
            figures.append(make_figure(results, task, name, filter_name, value))
    return figures


def metrics_of(metrics: Mapping[str, Any]) -> Iterator[tuple[str, str, float]]:
    """Yield the name, the filter and the value of each metric of a task, without its errors."""
    for key, value in metrics.items():
        name, _, filter_name = key.partition(",")
        if name in NOT_METRICS or name.endswith("_stderr"):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield name, filter_name, float(value)


def make_figure(
    results: Mapping[str, Any], task: str, name: str, filter_name: str, value: float
) -> Figure:
    """Return a figure of what lm-eval's evaluate returns."""
    metrics = results["results"][task]
    better = results["higher_is_better"].get(task, {}).get(name)
    number = results["n-samples"].get(task, {}).get("effective")
    label = name if filter_name in ("", NO_FILTER) else f"{name} ({filter_name})"
    rows = results.get("samples", {}).get(task, [])
    values = [row[name] for row in rows if row["filter"] == filter_name and name in row]
    residuals = residuals_of(name, value, values)
    stderr = metrics.get(f"{name}_stderr,{filter_name}")
    if not isinstance(stderr, int | float):  # lm-eval writes N/A
        stderr = None if residuals is None else error_of(residuals)
    return Figure(task, label, value, stderr, number, better, residuals)


def residuals_of(name: str, value: float, values: Sequence[Any]) -> list[float] | None:
    """Return the residuals of a metric, or None if its value is no mean of its rows.

    Args:
        values: of each row: a number, or for a loss the sum over the tokens and their number.
    """
    if not values:
        return None
    if name in WEIGHTED and all(isinstance(row, tuple | list) for row in values):
        return residuals_of_tokens(name, values)
    if not all(isinstance(row, int | float) for row in values):
        return None
    mean = math.fsum(values) / len(values)
    if abs(mean - value) > CLOSE * max(1.0, abs(value)):
        return None
    return [row - mean for row in values]


def residuals_of_tokens(name: str, sums: Sequence[Sequence[float]]) -> list[float]:
    """Return the residuals of a mean over all tokens, or of its exponential."""
    number = sum(count for _, count in sums)
    mean = math.fsum(total for total, _ in sums) / number
    scale = len(sums) / number
    if name == "perplexity":
        scale *= math.exp(min(mean, 700))  # its derivative
    return [scale * (total - mean * count) for total, count in sums]


def error_of(residuals: Sequence[float]) -> float | None:
    """Return the standard error of a mean by its residuals; None for fewer than two rows."""
    number = len(residuals)
    if number < 2:
        return None
    mean = math.fsum(residuals) / number
    squares = math.fsum((residual - mean) ** 2 for residual in residuals)
    return math.sqrt(squares / (number - 1) / number)
