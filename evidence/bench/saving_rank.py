# SPDX-License-Identifier: Apache-2.0
"""A rank of evidence/benchmark_saving.py: train, and record what the main thread does for saves.

    python evidence/bench/saving_rank.py FOLDER recipes/llama.py --async_save ...

Each rank writes FOLDER/RANK.json, in seconds:

    held_up      for each save, what the main thread spent on it
    until_whole  for each save, from its begin until it was known to be whole
    beside       of each step beside which a checkpoint was written, without what is in held_up
    apart        of each other step
    training     from the end of the first step to the begin of the last save
"""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from proof.faults import load  # noqa: E402


class Stopwatch:
    """The seconds of steps and saves of this rank."""

    def __init__(self) -> None:
        self.held_up: list[float] = []
        self.begun: list[float] = []
        self.until_whole: list[float] = []
        self.beside: list[float] = []
        self.apart: list[float] = []
        self.ends_of_steps: list[float] = []
        self.is_inside = False

    def watch(self, kind: Any, name: str, before: Callable[..., None] | None = None) -> None:
        """Add the seconds of a method, when no other watched one calls it, to the last save's."""
        original = getattr(kind, name)

        @functools.wraps(original)
        def timed(owner: Any, *arguments: Any, **options: Any) -> Any:
            if self.is_inside:
                return original(owner, *arguments, **options)
            self.is_inside = True
            start = time.perf_counter()
            if before is not None:
                before(start)
            result = original(owner, *arguments, **options)
            end = time.perf_counter()
            self.is_inside = False
            if self.held_up:
                self.held_up[-1] += end - start
            return result

        setattr(kind, name, timed)

    def begin_save(self, start: float) -> None:
        """Called when a save begins."""
        self.held_up.append(0.0)
        self.begun.append(start)

    def note_whole(self, is_pending: bool) -> None:
        """Called after each change of the checkpoint under way."""
        if not is_pending and len(self.until_whole) < len(self.begun):
            begun = self.begun[len(self.until_whole)]
            self.until_whole.append(time.perf_counter() - begun)

    def end_step(self, begin: float, is_beside: bool) -> None:
        """Called when the work of a step is done, and before anything is saved."""
        now = time.perf_counter()
        self.ends_of_steps.append(now)
        if len(self.ends_of_steps) > 1:  # The first step allocates.
            (self.beside if is_beside else self.apart).append(now - begin)

    def write(self, path: Path) -> None:
        """Write what was recorded."""
        seconds = {
            "held_up": self.held_up,
            "until_whole": self.until_whole,
            "beside": self.beside,
            "apart": self.apart,
            "training": self.begun[-1] - self.ends_of_steps[0],
        }
        path.write_text(json.dumps(seconds))


def main() -> None:
    """Run a recipe as `python RECIPE ...` would, with its saves and steps timed."""
    folder, recipe, *arguments = sys.argv[1:]
    sys.argv = [recipe, *arguments]
    sys.path[0] = str(Path(recipe).resolve().parent)  # instead of the folder of this file
    module = load(recipe)
    args = module.start(module.Arguments, module.__doc__)
    from components.run import Run
    from components.saving import Saver

    stopwatch = Stopwatch()
    stopwatch.watch(Run, "_save", before=stopwatch.begin_save)
    stopwatch.watch(Saver, "advance")
    stopwatch.watch(Saver, "finish")
    end_phase = Saver._end_phase
    finish_step = Run.finish_step
    steps = Run.steps
    begin = [0.0]

    def end_phase_and_note(saver: Saver, *arguments: Any) -> Any:
        problem = end_phase(saver, *arguments)
        stopwatch.note_whole(is_pending=saver._pending is not None)
        return problem

    def finish_and_note(run: Run, *arguments: Any, **options: Any) -> None:
        finish_step(run, *arguments, **options)
        stopwatch.end_step(begin[0], is_beside=run._saver._pending is not None)

    def steps_and_note(run: Run) -> Any:
        for step in steps(run):
            begin[0] = time.perf_counter()
            yield step

    patched: list[tuple[Any, str, Callable]] = [
        (Saver, "_end_phase", end_phase_and_note),
        (Run, "finish_step", finish_and_note),
        (Run, "steps", steps_and_note),
    ]
    for kind, name, function in patched:
        setattr(kind, name, function)
    module.main(args)
    stopwatch.write(Path(folder, f"{os.environ.get('RANK', 0)}.json"))


if __name__ == "__main__":
    main()
