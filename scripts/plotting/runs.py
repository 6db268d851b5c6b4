# SPDX-License-Identifier: Apache-2.0
"""What a run has written: metrics.jsonl and run.json in its folder."""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import Exit, stop

Line = dict[str, Any]  # one of metrics.jsonl: its step, and numbers or None by their names
Curve = tuple[list[float], list[float]]  # steps, and a value for each
# The name of the speed in metrics.jsonl, and that of what it counts
COUNTS = {"tokens_per_second": "num_input_tokens_seen", "images_per_second": "num_images_seen"}
ELAPSED = "elapsed_seconds"
# Steps at the start of each call that are slower: memory is allocated, kernels are chosen
WARM_UP_STEPS = 5
PARTS = 20  # a smoothed value is a mean over one such part of a run
NOT_COMPARED = ("output_dir", "run_name")
LONGEST_VALUE = 32  # characters of a setting in a label


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

    def curve(self, name: str) -> Curve:
        """Return the values of a metric, those of the steps before those of the evaluations."""
        lines = [*self.steps, *self.evaluations]
        found = [line for line in lines if line.get(name) is not None]
        return [line["step"] for line in found], [line[name] for line in found]

    def eval_metrics(self) -> list[str]:
        """Return the names of the metrics of all evaluations, in the order of their lines."""
        names = dict.fromkeys(itertools.chain.from_iterable(self.evaluations))
        return [name for name in names if name.startswith("eval_")]

    def settings(self) -> dict[str, Any]:
        """Return strategy, precision and arguments by their names, as run.json has them."""
        settings = {}
        if "strategy" in self.facts.get("summary", {}):
            settings["strategy"] = self.facts["summary"]["strategy"]
        if "ACCELERATE_MIXED_PRECISION" in self.facts.get("launch", {}):
            settings["mixed_precision"] = self.facts["launch"]["ACCELERATE_MIXED_PRECISION"]
        arguments = self.facts.get("arguments", {})
        return settings | {key: arguments[key] for key in arguments if key not in NOT_COMPARED}


def read_run(folder: str) -> RecordedRun:
    """Return the run in a folder; exit with 65 if no line of its metrics has a step and a loss."""
    path = Path(folder, "metrics.jsonl")
    record = Path(folder, "run.json")
    lines: list[Line] = []
    facts = {}
    place = str(path)
    try:
        for number, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            place = f"{path}, line {number}"
            lines.append(json.loads(text))
        place = str(record)
        if record.is_file():
            facts = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        stop(Exit.DATA, f"{place}: {error}; give the --output_dir of a run")
    if not any(line.get("loss") is not None for line in lines):
        stop(Exit.DATA, f"{path}: no line with a loss")
    steps = []
    evaluations = []
    for line in lines:
        is_evaluation = any(name.startswith("eval_") for name in line)
        if is_evaluation:
            evaluations.append(line)
        else:
            steps.append(line)
    return RecordedRun(folder, steps, evaluations, facts)


def smooth(values: Sequence[float]) -> list[float]:
    """Return moving averages over about a twentieth of the run, centered so that no curve lags.

    At both ends only the inner half of the window exists. It is not narrowed further, since the
    curve would then begin and end with the luck of a single step.
    """
    half = len(values) // (2 * PARTS)
    averages = []
    for place in range(len(values)):
        averages.append(mean(values[max(0, place - half) : place + half + 1]))
    return averages


def first_and_last(values: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and the last twentieth: one step is a matter of luck."""
    part = max(1, len(values) // PARTS)
    return mean(values[:part]), mean(values[-part:])


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one value; not finite if one of them is not."""
    return sum(values) / len(values)


# ---- Time and speed ----
@dataclass(frozen=True)
class Interval:
    """What happened between two logged steps of one call, without an evaluation between them.

    Attributes:
        step: at its end.
        seen: tokens or images.
        seconds: how long it took.
        is_warm: whether it began after the first steps of its call.
    """

    step: int
    seen: float
    seconds: float
    is_warm: bool


def speed_name(run: RecordedRun) -> str | None:
    """Return the name of the speed that a run has recorded, together with its times, or None."""
    for name, count in COUNTS.items():
        if all({name, count, ELAPSED} <= line.keys() for line in run.steps):
            return name
    return None


def calls_of(run: RecordedRun) -> list[list[Line]]:
    """Return the lines of each call of a run: one that continues another begins at no seconds."""
    calls: list[list[Line]] = []
    for line in run.steps:
        if not calls or line[ELAPSED] < calls[-1][-1][ELAPSED]:
            calls.append([])
        calls[-1].append(line)
    return calls


def times_of(run: RecordedRun) -> list[float]:
    """Return the seconds of training until each logged step; [] without recorded times.

    Of an earlier call the time until its last step that counts is included.
    """
    seconds: list[float] = []
    if speed_name(run) is None:
        return seconds
    for lines in calls_of(run):
        earlier = seconds[-1] if seconds else 0.0
        seconds += [earlier + line[ELAPSED] for line in lines]
    return seconds


def intervals_of(run: RecordedRun) -> Iterator[Interval]:
    """Yield what happened between logged steps, where the run did not evaluate in between."""
    name = speed_name(run)
    if name is None:
        return
    count = COUNTS[name]
    evaluated = {line["step"] for line in run.evaluations}
    began = 0  # The step with which the call began
    for lines in calls_of(run):
        for first, second in itertools.pairwise(lines):
            seconds = second[ELAPSED] - first[ELAPSED]
            # An evaluation after a step is between that step's line and the next one
            if seconds > 0 and evaluated.isdisjoint(range(first["step"], second["step"])):
                is_warm = first["step"] >= began + WARM_UP_STEPS
                seen = second[count] - first[count]
                yield Interval(second["step"], seen, seconds, is_warm)
        began = lines[-1]["step"]


def mean_speed(run: RecordedRun) -> float | None:
    """Return the mean speed without evaluations and the first steps of each call, or None."""
    warm = [interval for interval in intervals_of(run) if interval.is_warm]
    if not warm:
        return None
    return sum(interval.seen for interval in warm) / sum(interval.seconds for interval in warm)


# ---- Several runs ----
def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return for each run the part of its folder's path in which it differs from the others."""
    if len(runs) == 1:
        return [runs[0].folder]
    paths = [list(Path(run.folder).parts) for run in runs]
    for end in (0, -1):
        while all(len(parts) > 1 and parts[end] == paths[0][end] for parts in paths):
            for parts in paths:
                del parts[end]
    return ["/".join(parts) for parts in paths]


def differences(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return for each run the settings in which the runs with a run.json differ."""
    everything = [run.settings() for run in runs]
    known = [settings for settings in everything if settings]
    differing = []
    for name in dict.fromkeys(itertools.chain.from_iterable(known)):
        values = {json.dumps(settings.get(name), sort_keys=True) for settings in known}
        if len(values) > 1:
            differing.append(name)
    found = []
    for settings in everything:
        found.append({name: settings[name] for name in differing if name in settings})
    return found


def setting_text(name: str, value: Any) -> str:
    """Return a setting as a label has it, such as learning_rate=0.001."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    if len(text) > LONGEST_VALUE:
        text = f"{text[: LONGEST_VALUE - 1]}…"
    return text if name == "strategy" else f"{name}={text}"
