# SPDX-License-Identifier: Apache-2.0
"""The results of all trials as a table, and as docs/fault_injection.md."""

from decimal import Decimal

from proof.markdown import table
from proof.trials.groups import GROUPS

HEADER = ["group", "what was done", "trials", "as promised", "worst outcome"]
ABOUT = (
    "`python evidence/fault_injection.py` interrupts the shipped recipes under the shipped YAML "
    "files in every way listed here, resumes them, and compares the result with a run that was "
    "never interrupted. A trial is as promised if the run behaves as "
    "[Checkpoints](checkpoints.md) says. The last column is the worst outcome of all trials of a "
    'row: 0 differences means that losses and weights are equal bit for bit. "3 of 26" stands for '
    "3 trials that were run of 26 that there are. Generated from `results/fault_injection.json`."
)
CASES = 8  # cases of a group that are named, approximately


def summary(groups: dict) -> str:
    """Return the table: one row for each `what` of each group."""
    lines = []
    for group, found in groups.items():
        trials = found["trials"]
        kinds = {trial["what"] for trial in trials}
        lines += [line_of(group, what, trials) for what in sorted(kinds)]
        if not trials:
            lines.append([group, "skipped: not possible on this machine", "0", "0", ""])
    return table(HEADER, lines)


def line_of(group: str, what: str, trials: list[dict]) -> list[str]:
    """Return the row of one `what`: how many were tried, how many held, and the worst outcome."""
    same = [trial for trial in trials if trial["what"] == what]
    good = [trial for trial in same if trial["ok"]]
    worst = max(trial["figure"] for trial in same)
    figure = f"{GROUPS[group].unit}: {number_text(worst)}"
    return [group, what, tried_text(group, what, same), number_tried(good), figure]


def tried_text(group: str, what: str, trials: list[dict]) -> str:
    """Return how many of one `what` were tried, as "3 of 26" if not all were."""
    planned = [trial for trial in GROUPS[group].trials() if trial.what == what]
    if len(trials) >= len(planned):
        return number_tried(trials)
    number = sum(trial.count for trial in planned)
    return f"{number_tried(trials)} of {number:,}"


def number_text(number: float) -> str:
    """Return a number with two significant digits and without an exponent."""
    return f"{Decimal(f'{number:.2g}'):f}"


def number_tried(trials: list[dict]) -> str:
    """Return the number of attempts in these trials, with thousands separators."""
    return f"{sum(trial['count'] for trial in trials):,}"


def report(groups: dict) -> str:
    """Return the text of docs/fault_injection.md."""
    parts = [
        "# Fault injection",
        ABOUT,
        summary(groups),
    ]
    for group, found in groups.items():
        parts += [f"## {group.capitalize()}", *paragraphs_of(found)]
    return "\n\n".join(parts) + "\n"


def paragraphs_of(found: dict) -> list[str]:
    """Return the report on a group: how it was measured, some cases, and what failed."""
    versions = [f"{name} {version}" for name, version in found["versions"].items()]
    measured = [found["date"], found["device"], *versions]
    parts = [f"Measured on {', '.join(measured)}, with `{found['command']}`."]
    details = sorted({trial["detail"] for trial in found["trials"]} - {""})
    if details:
        some = "; ".join(details[:: len(details) // CASES + 1])
        if len(details) == 1:
            parts.append(f"One case: {some}.")
        else:
            parts.append(f"{len(details)} cases, including {some}.")
    for trial in found["trials"]:
        if not trial["ok"]:
            note = trial["note"][:300]
            parts.append(f"FAILED: {trial['what']}, {trial['detail']}: {note}")
    return parts
