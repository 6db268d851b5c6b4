# SPDX-License-Identifier: Apache-2.0
"""The calls of a run: each resumes where the last one ended, and its clock starts at zero.

metrics.jsonl has in each line the tokens (or images) since the run began, and the time and the mean
speed since the call began. What was seen before the call follows from these three, and with it
which lines are of one call.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from plotting.curves import Curve
from plotting.runs import Line, RecordedRun

# The name of the speed in metrics.jsonl, and that of what it counts
COUNTS = {"tokens_per_second": "num_input_tokens_seen", "images_per_second": "num_images_seen"}
ELAPSED = "elapsed_seconds"
# Steps at the start of each call that are slower: memory is allocated, kernels are chosen
WARM_UP_STEPS = 5


@dataclass(frozen=True)
class Interval:
    """What happened between two logged steps of one call.

    Attributes:
        step: at its end.
        seen: tokens or images.
        seconds: how long it took.
        is_warm: whether it began after the first steps of its call.
    """

    step: float
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
    """Return the lines of the training steps of each call; [] if the run has not recorded times."""
    name = speed_name(run)
    if name is None:
        return []

    def seen_before_the_call(line: Line) -> int:
        return round(line[COUNTS[name]] - line[name] * line[ELAPSED])

    return [list(lines) for _, lines in itertools.groupby(run.steps, seen_before_the_call)]


def times_of(run: RecordedRun) -> Curve:
    """Return the seconds of training until each logged step; empty without recorded times.

    Of an earlier call the time until its last step that counts is included.
    """
    steps = []
    seconds = []
    earlier = 0.0
    for lines in calls_of(run):
        steps += [line["step"] for line in lines]
        seconds += [earlier + line[ELAPSED] for line in lines]
        earlier = seconds[-1]
    return Curve(steps, seconds)


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
            if seconds > 0 and not any(first["step"] <= at < second["step"] for at in evaluated):
                is_warm = first["step"] >= began + WARM_UP_STEPS
                yield Interval(second["step"], second[count] - first[count], seconds, is_warm)
        began = lines[-1]["step"]


def speeds_of(run: RecordedRun) -> Curve:
    """Return the tokens or images per second between logged steps; empty without times."""
    intervals = list(intervals_of(run))
    rates = [interval.seen / interval.seconds for interval in intervals]
    return Curve([interval.step for interval in intervals], rates)


def mean_speed(run: RecordedRun) -> float | None:
    """Return the mean speed without evaluations and the first steps of each call.

    It is None if no such step was logged.
    """
    warm = [interval for interval in intervals_of(run) if interval.is_warm]
    if not warm:
        return None
    return sum(interval.seen for interval in warm) / sum(interval.seconds for interval in warm)


def duration(run: RecordedRun) -> float | None:
    """Return the seconds of training, evaluations and checkpoints included, or None."""
    seconds = times_of(run).values
    if not seconds:
        return None
    return seconds[-1]
