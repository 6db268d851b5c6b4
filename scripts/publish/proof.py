# SPDX-License-Identifier: Apache-2.0
"""The table of README.md that sums up what was checked, from all results."""

import math
from collections.abc import Iterable

from planner.accuracy import METHODS, errors_of
from proof.compare import BOUNDS
from proof.markdown import table

from .strategies import Results, Row, compared_runs, decimal, largest

HEADER = ["what was checked", "result", "bound", "how to repeat it"]
PLANNER_BOUND = "5%"  # tests/unit/planner/test_ranks.py
INTERRUPTED = ("resume", "every step", "five", "signals", "twice")


def proof_block(results: Results) -> str:
    """Return one row for each claim: what was checked, the result, its bound and the command."""
    lines = [
        parity_line(results),
        sharding_line(results),
        resume_line(results),
        kills_line(results),
        planner_line(results),
    ]
    return table(HEADER, lines)


def parity_line(results: Results) -> list[str]:
    """Return the row on equal losses, of the runs in fp32."""
    runs = [row for row in compared_runs(results) if row["precision"] == "no"]
    configs = {row["config"] for row in runs} - {"single"}
    recipes = {row["recipe"] for row in runs}
    difference = largest(runs, "loss")
    if difference is None:
        raise ValueError("results/parity.json has no run that reports a loss")
    return [
        f"Every strategy gives the same loss: {len(runs)} runs, {len(recipes)} recipes, "
        f"{len(configs)} multi-GPU YAMLs",
        f"largest relative difference from a single-process run: {decimal(difference)}",
        decimal(BOUNDS["loss"]),
        "`python scripts/parity.py`",
    ]


def sharding_line(results: Results) -> list[str]:
    """Return the row on the bytes that each rank has."""
    runs = [row for row in results["parity"]["rows"] if row["verdict"] == "ok"]
    kept = sum(row["bytes"] == "ok" for row in runs)
    return [
        "Each process has only the share of the training state that its YAML promises",
        f"{kept} of {len(runs)} runs",
        "all",
        "`python scripts/parity.py`",
    ]


def resume_line(results: Results) -> list[str]:
    """Return the row on runs that were interrupted and resumed."""
    trials = trials_of(results, INTERRUPTED)
    return [
        "An interrupted and resumed run equals an uninterrupted one, bit for bit",
        f"{kept_of(trials)} of {tried_of(trials)} interruptions",
        "all",
        "`python scripts/fault_injection.py`",
    ]


def kills_line(results: Results) -> list[str]:
    """Return the row on `kill -9` at random moments."""
    trials = trials_of(results, ["random kills"])
    lost = math.ceil(max(trial["figure"] for trial in trials))
    return [
        "`kill -9` at a random moment loses no more than the steps since the last checkpoint",
        f"{kept_of(trials)} of {tried_of(trials)} kills, at most {lost} steps lost when saving "
        "every second step",
        "all",
        "`python scripts/fault_injection.py --groups 'random kills'`",
    ]


def planner_line(results: Results) -> list[str]:
    """Return the row on the planned peak memory, against real tensors under every YAML."""
    method = METHODS[0]
    rows = [{method: row["beside_bucket"]} for row in results["planner_ranks"]["rows"]]
    number, mean, above, below = errors_of(rows, method)
    worst = max(above, -below)
    return [
        f"Planned peak memory equals the measured tensors of {number} CPU jobs, every YAML",
        f"mean error {mean:.2%}, largest {worst:.2%}",
        PLANNER_BOUND,
        "`python scripts/track_ranks.py`",
    ]


def trials_of(results: Results, groups: Iterable[str]) -> list[Row]:
    """Return the trials of some groups of scripts/fault_injection.py."""
    return [trial for group in groups for trial in results["fault_injection"][group]["trials"]]


def tried_of(trials: Iterable[Row]) -> int:
    """Return the number of attempts."""
    return sum(trial["count"] for trial in trials)


def kept_of(trials: Iterable[Row]) -> int:
    """Return the number of attempts that ended as promised."""
    return sum(trial["count"] for trial in trials if trial["ok"])
