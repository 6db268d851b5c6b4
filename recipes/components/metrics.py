# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, trackers and the progress bar.

Each logged step and each evaluation is one JSON object on a line of OUTPUT_DIR/metrics.jsonl, in
the order in which they happened. Tests, plots and comparisons read that file, never the console.
"""

import json
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from components.folder import METRICS
from core.stop import write_whole

# A complete line; in that of an evaluation the second key begins with eval_
LINE = re.compile(r'{"step": ([0-9]+), "(eval_)?.*}\n$')


class Metrics:
    """The destinations of a run's numbers. Every rank has one; the main process writes.

    Attributes:
        start: when training began in this process, in seconds of time.perf_counter().
    """

    def __init__(
        self, accelerator: Accelerator, output_dir: str, total_steps: int, first_step: int
    ) -> None:
        """Open the file and draw the bar.

        Args:
            first_step: steps that an earlier call of this run has done; with 0 the file is
                replaced.
        """
        self._accelerator = accelerator
        path = os.devnull
        if accelerator.is_main_process:
            path = Path(output_dir, METRICS)
        self._file = open(path, "a" if first_step else "w", buffering=1)
        self._bar = tqdm(
            desc="Training",
            total=total_steps,
            initial=first_step,
            unit="step",
            disable=not accelerator.is_main_process,
        )
        self.start = time.perf_counter()

    def write(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write a line, and log those of its values that are not None to the trackers.

        They get the step as such, and not also as a metric.
        """
        self._file.write(json.dumps(metrics) + "\n")
        known = {}
        for name, value in metrics.items():
            if value is not None and name != "step":
                known[name] = value
        self._accelerator.log(known, step=step)

    def show(self, numbers: Mapping[str, str]) -> None:
        """Show numbers beside the bar when it is drawn next."""
        self._bar.set_postfix(numbers, refresh=False)

    def say(self, text: str) -> None:
        """Print a line above the bar, on the main process."""
        if self._accelerator.is_main_process:
            self._bar.write(text)

    def step_is_done(self) -> None:
        """Advance the bar by one step."""
        self._bar.update()

    def close(self) -> None:
        """Close the bar, so that what is printed next is the last line."""
        self._bar.close()


def finite_or_none(number: float) -> float | None:
    """Return a number as JSON can represent it: None in place of NaN and infinity."""
    return number if math.isfinite(number) else None


def peak_memory_gib() -> float:
    """Return the most memory that this process has held so far, of the GPU or else of the host."""
    on_gpu = torch.cuda.max_memory_allocated()
    if on_gpu:
        return on_gpu / 2**30
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024 / 2**30  # Linux counts it in KiB.


def drop_lines_after(path: Path, step: int, evaluated: bool) -> None:
    """Remove from a file with one line per step the lines that a run wrote after `step`.

    Incomplete lines are removed too.

    Args:
        evaluated: whether the evaluation after `step` counts as done; if not, it is repeated.
    """
    if not path.exists():
        return
    lines = path.read_text().splitlines(keepends=True)
    write_whole(path, "".join(line for line in lines if is_kept(line, step, evaluated)))


def is_kept(line: str, step: int, evaluated: bool) -> bool:
    """Return whether a line is complete and about a step, or an evaluation, that is done."""
    found = LINE.match(line)
    if found is None:
        return False
    is_evaluation = found[2] is not None
    if is_evaluation and not evaluated:
        return int(found[1]) < step
    return int(found[1]) <= step
