# SPDX-License-Identifier: Apache-2.0
"""What a run has written: metrics.jsonl and run.json in its folder."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exits import Exit, stop

RUN = "run.json"
METRICS = "metrics.jsonl"
Line = dict[str, Any]  # one of metrics.jsonl: its step, and numbers or None by their names


@dataclass(frozen=True)
class RecordedRun:
    """A run as its folder tells it.

    Attributes:
        folder: as the command line names it.
        steps: the lines of training steps; at least one has a loss.
        evaluations: the lines of evaluations.
        facts: the content of run.json; {} if there is none.
    """

    folder: str
    steps: list[Line]
    evaluations: list[Line]
    facts: dict[str, Any]

    @property
    def lines(self) -> list[Line]:
        """All lines: the training steps, then the evaluations."""
        return self.steps + self.evaluations


def read_run(folder: str) -> RecordedRun:
    """Return the run in a folder; exit with 65 if no line of its metrics has a step and a loss."""
    lines = read_metrics(folder)
    steps = [line for line in lines if not is_evaluation(line)]
    evaluations = [line for line in lines if is_evaluation(line)]
    return RecordedRun(folder, steps, evaluations, read_facts(folder))


def read_metrics(folder: str) -> list[Line]:
    """Return the lines of FOLDER/metrics.jsonl; exit with 65 if none has a step and a loss."""
    path = Path(folder) / METRICS
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        stop(Exit.DATA, f"cannot read {path}: {reason}; give the --output_dir of a run")
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(parse_line(text))
        except ValueError as problem:
            stop(Exit.DATA, f"{path}, line {number}: {problem}")
    if not any(line.get("loss") is not None for line in lines):
        stop(Exit.DATA, f"{path}: no line with a loss")
    return lines


def parse_line(text: str) -> Line:
    """Return one line of metrics.jsonl. Raises ValueError that says what is wrong with it."""
    try:
        line = json.loads(text)
    except ValueError:
        line = None
    if not isinstance(line, dict) or line.get("step") is None:
        raise ValueError("not a JSON object with a step")
    for name, value in line.items():
        if value is not None and not isinstance(value, int | float):
            raise ValueError(f"{name} must be a number")
    return line


def is_evaluation(line: Line) -> bool:
    """Return whether a line is that of an evaluation."""
    return any(name.startswith("eval_") for name in line)


def read_facts(folder: str) -> dict[str, Any]:
    """Return the content of FOLDER/run.json, {} without one; exit with 65 if it is no object."""
    path = Path(folder) / RUN
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"cannot read {path}: {error}; move it away to go without it")
    if not isinstance(facts, dict):
        stop(Exit.DATA, f"{path}: not a JSON object; move it away to go without it")
    return facts
