# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be used: the cause in one line, and the message that names them."""

import json
import re
from collections.abc import Mapping, Sequence

BLANK = "is blank"  # the problem of a line with nothing but spaces
MAX_LENGTH = 400  # characters of a cause
NUM_NAMED = 3  # rows that a message names; it only counts the others
TOO_LONG = re.compile(r"(\d+) tokens are prompt")


def explain(error: Exception) -> str:
    """Return why a row cannot be used, in one line that continues "train.jsonl, line 7: "."""
    if isinstance(error, json.JSONDecodeError):
        problem = BLANK
        if error.doc.strip():
            problem = f"is not JSON: {error.msg} at column {error.colno}"
    elif type(error) is ValueError:  # raised for this row, by a check
        problem = str(error)
    else:
        problem = f"cannot be used: {type(error).__name__}: {error}"
    printable = problem.encode(errors="backslashreplace").decode()
    return in_one_line(printable)


def explain_cause(error: BaseException, name: str) -> str:
    """Return in one line why a file cannot be read: the cause of the error, if it has one.

    Args:
        name: of the data set, with which the message begins.
    """
    cause = error.__cause__ or error
    if isinstance(cause, OSError) and cause.strerror:
        is_named = cause.filename is None or str(cause.filename) == name
        return cause.strerror if is_named else f"{cause.filename}: {cause.strerror}"
    return in_one_line(str(cause))


def in_one_line(text: str) -> str:
    """Return a text without line breaks, cut to MAX_LENGTH characters."""
    return " ".join(text.split())[:MAX_LENGTH]


def without_blank(problems: Mapping[int, str]) -> dict[int, str]:
    """Return the problems other than blank lines, which do no harm between rows."""
    return {number: problem for number, problem in problems.items() if problem != BLANK}


def report_some(problems: Mapping[int, str], prefix: str, name: str, num_rows: int) -> list[str]:
    """Return the message for a data set in which some rows cannot be used and others can.

    Args:
        problems: {number of a row, from 1: its problem}.
        prefix: what stands before the number of a row: "train.jsonl, line".
        name: the data set.
        num_rows: all rows, including blank lines.
    """
    unit = prefix.split()[-1]
    count = f"{len(problems)} of {num_rows} {unit}s cannot be used"
    fix = "fix them"
    lengths = lengths_of_prompts(list(problems.values()))
    if lengths:
        fix = advise_max_length(lengths)
        if len(lengths) < len(problems):
            fix = f"{fix}; fix the others"
    advice = f"{fix}, or leave them out with --skip_bad_rows"
    return [*name_first(problems, prefix), f"{name}: {count}: {advice}"]


def report_all(problems: Mapping[int, str], prefix: str, name: str) -> list[str]:
    """Return the message for a data set without a single row that can be used.

    It does not advise to leave these rows out, since nothing would remain. If all rows have the
    same problem, it is named once, with its fix.

    Args:
        problems, prefix, name: as in `report_some`.
    """
    unit = prefix.split()[-1]
    first = next(iter(problems))
    texts = list(problems.values())
    if len(problems) == 1:
        return [f"{prefix} {first}, the only one: {with_fix(texts)}"]
    none = f"{name}: none of the {len(problems)} {unit}s can be used"
    if are_alike(texts):
        place = prefix.removeprefix(f"{name}, ")
        reason = f"{place} {first}: {with_fix(texts)}"
        return [f"{none}, all for the same reason: {reason}"]
    return [*name_first(problems, prefix), f"{none}: fix them"]


def name_first(problems: Mapping[int, str], prefix: str) -> list[str]:
    """Return a line for each of the first rows that cannot be used."""
    first = list(problems.items())[:NUM_NAMED]
    return [f"{prefix} {number}: {problem}" for number, problem in first]


def are_alike(problems: Sequence[str]) -> bool:
    """Return whether all problems are the same up to the first colon, apart from numbers."""
    kinds = {re.sub(r"\d+", "", problem.split(": ")[0]) for problem in problems}
    return len(kinds) == 1


def with_fix(problems: Sequence[str]) -> str:
    """Return the problem that all rows share, with its fix.

    The fix is not part of a row's own problem: that may come from the cache, which another recipe
    filled, and the fix may depend on all rows.
    """
    problem = problems[0]
    lengths = lengths_of_prompts(problems)
    if len(lengths) == len(problems):
        text = problem.split(": ")[0]
        return f"{text}: {advise_max_length(lengths)}"
    return problem


def lengths_of_prompts(problems: Sequence[str]) -> list[int]:
    """Return the numbers of tokens of those prompts that leave no room for an answer."""
    too_long = [TOO_LONG.search(text) for text in problems]
    return [int(found[1]) for found in too_long if found is not None]


def advise_max_length(lengths: Sequence[int]) -> str:
    """Return the fix for prompts of these lengths, which leave no room for an answer."""
    return f"raise --max_length, the longest prompt has {max(lengths)} tokens"
