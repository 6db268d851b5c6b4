# SPDX-License-Identifier: Apache-2.0
"""The table of README.md that sums up what was checked, from all results."""

import math
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from families import tables as families
from measured.accuracy import METHODS, errors_of
from proof.markdown import decimal, table
from test_parity import BOUNDS

from .strategies import Results, Row, compared_runs, largest

HEADER = ["what was checked", "result", "bound", "how to repeat it"]
FORMULAS = METHODS[0]  # the planner's default
PLANNER_BOUND = "5%"  # tests/unit/planner/test_ranks.py
INTERRUPTED = ("resume", "every step", "five", "signals", "twice")

DIFFERENCES = "differences from an uninterrupted run"
LOSS = "largest relative difference in loss"
UNITS = {  # of the figures of a group of evidence/test_faults.py
    "resume": DIFFERENCES,
    "every step": DIFFERENCES,
    "five": DIFFERENCES,
    "elastic": LOSS,
    "strategies": LOSS,
    "signals": DIFFERENCES,
    "twice": DIFFERENCES,
    "dead ranks": "seconds until the other ranks ended",
    "random kills": "steps lost",
    "random kills, --async_save": "steps lost",
    "writes": DIFFERENCES,
    "disk": DIFFERENCES,
    "hashing": "share of the time of a save",
    "damage": "missed",
    "foreign": "broken promises",
    "numbers": "broken promises",
}


def faults_block(results: Results) -> str:
    """Return one row for each thing that was done to runs: how many trials, and the worst one."""
    lines = []
    rows = results["faults"]["rows"]
    for group, unit in UNITS.items():
        of_group = [row for row in rows if row["group"] == group]
        for what in sorted({row["what"] for row in of_group}):
            same = [row for row in of_group if row["what"] == what]
            worst = Decimal(f"{max(row['figure'] for row in same):.2g}")
            lines.append([group, what, f"{tried_of(same):,}", f"{unit}: {worst:f}"])
    return table(["group", "what was done", "trials, all as promised", "worst outcome"], lines)


def proof_block(results: Results) -> str:
    """Return one row for each claim: what was checked, the result, its bound and the command."""
    lines = [
        parity_line(results),
        sharding_line(results),
        faults_line(results),
        planner_line(results),
        *families_lines(results),
    ]
    return table(HEADER, lines)


def parity_line(results: Results) -> list[str]:
    """Return the row on equal losses, of the runs in fp32."""
    runs = [row for row in compared_runs(results) if row["precision"] == "no"]
    configs = {row["config"] for row in runs if row["config"] != "single"}
    recipes = {row["recipe"] for row in runs}
    difference = largest(runs, "loss")
    if difference is None:
        raise ValueError("results/parity.json has no run that reports a loss")
    counts = f"{len(runs)} runs, {len(recipes)} recipes, {len(configs)} multi-GPU YAMLs"
    shown = decimal(difference)
    return [
        f"Every strategy gives the same loss: {counts}",
        f"largest relative difference from a single-process run: {shown}",
        decimal(BOUNDS["loss"]),
        "`pytest evidence/test_parity.py --all`",
    ]


def sharding_line(results: Results) -> list[str]:
    """Return the row on the bytes that each rank has."""
    measured = results["parity"]
    runs = [row for row in measured["rows"] if row["verdict"] == "ok"]
    kept = sum(row["bytes"] == "ok" for row in runs)
    number = len(runs)
    counts = f"{kept} of {number} runs"
    return [
        "Each process has only the share of the training state that its YAML promises",
        counts,
        "all",
        "`pytest evidence/test_parity.py --all`",
    ]


def faults_line(results: Results) -> list[str]:
    """Return the row on runs that were interrupted, or killed at random moments, and resumed."""
    interrupted = count_text(trials_of(results, INTERRUPTED))
    kills = trials_of(results, ["random kills"])
    of_waiting_runs = (
        f"{count_text(kills)} `kill -9` at random moments, at most {most_lost(kills)} steps lost "
        "when saving every second step"
    )
    kills = trials_of(results, ["random kills, --async_save"])
    beside_saves = f"{count_text(kills)} with `--async_save`, at most {most_lost(kills)} lost"
    return [
        "A run that was interrupted and resumed equals an uninterrupted one, bit for bit",
        f"{interrupted} interruptions; {of_waiting_runs}, and {beside_saves}",
        "all",
        "`pytest evidence/test_faults.py --all`",
    ]


def most_lost(kills: Sequence[Row]) -> int:
    """Return the largest number of steps that a kill has cost."""
    return math.ceil(max(trial["figure"] for trial in kills))


def planner_line(results: Results) -> list[str]:
    """Return the row on the planned peak memory, with the plans that are furthest off too.

    Measured are real tensors, of every YAML and of jobs with random settings in one process. Where
    experts are spread, some plans were told how many tokens their routers sent to each rank.
    """
    measured = results["planner_ranks"]
    rows = [{FORMULAS: row["beside_bucket"]} for row in measured["rows"]]
    told = [row for row in measured["rows"] if "even" in row]
    untold = max(abs(row["even"]) for row in told)
    number = len(told)
    cells = results["planner"]["cells"]
    drawn = [cell for cell in cells if cell["kind"] == "drawn"]
    on_ranks = errors_text(rows, "jobs, every YAML on two to eight ranks")
    at_random = errors_text(drawn, "fp32 jobs with random settings")
    return [
        "Planned peak memory equals the measured tensors",
        f"{on_ranks}, {number} of them told where tokens went to experts (untold: at most "
        f"{untold:.2%}); {at_random}",
        PLANNER_BOUND,
        "`python evidence/track_ranks.py`, `python evidence/validate_planner.py`",
    ]


def families_lines(results: Results) -> list[list[str]]:
    """Return the row on model families, or none as long as none was measured."""
    if "model_families" not in results:
        return []
    rows = results["model_families"]["rows"]
    good = families.good_rows(rows)
    number = len(rows)
    counts = f"{len(good)} of {number}"
    shown = families.largest_of_first(good)
    line = [
        f"Tiny models of {number} model families have the loss that transformers gives",
        f"{counts}, largest relative difference in the first loss: {shown}",
        decimal(families.BOUND),
        "`python evidence/model_families.py`",
    ]
    return [line]


def errors_text(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    """Return the errors of the plans by formulas.

    kind: what the rows are, for example "jobs".
    """
    _, mean, above, below = errors_of(rows, FORMULAS)
    number = len(rows)
    worst = max(above, -below)
    return f"{number} {kind}: mean error {mean:.2%}, largest {worst:.2%}"


def trials_of(results: Results, groups: Iterable[str]) -> list[Row]:
    """Return the trials of some groups of evidence/test_faults.py."""
    return [trial for trial in results["faults"]["rows"] if trial["group"] in groups]


def count_text(trials: Sequence[Row]) -> str:
    """Return how many attempts ended as promised, as "113 of 113"."""
    kept = kept_of(trials)
    tried = tried_of(trials)
    return f"{kept} of {tried}"


def tried_of(trials: Iterable[Row]) -> int:
    """Return the number of attempts."""
    return sum(trial["count"] for trial in trials)


def kept_of(trials: Iterable[Row]) -> int:
    """Return the number of attempts that ended as promised."""
    return sum(trial["count"] for trial in trials if trial["ok"])
