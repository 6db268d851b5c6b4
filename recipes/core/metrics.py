# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl, the trackers of --report_to and the progress bar.

Each logged step and each evaluation is one JSON object on a line of OUTPUT_DIR/metrics.jsonl, in
the order in which they happened. Tests, plots and comparisons read that file, never the console.
"""

import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from tqdm.auto import tqdm

METRICS = "metrics.jsonl"
# FLOP/s of dense products in bf16 by a part of a card's name, from data sheets
PEAKS = {
    "B200": 2250e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "MI300X": 1307e12,
}
# A complete line; in that of an evaluation the second key begins with eval_
LINE = re.compile(rb'{"step": ([0-9]+), "(eval_)?.*}\n$')
# What each tracker's own function calls the name of a run (accelerate/tracking.py); accelerate
# gives the others, such as TensorBoard, the project's name as that of the run
NAME_OF_RUN = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "clearml": "task_name",
    "dvclive": "exp_name",
    "swanlab": "experiment_name",
}


class Metrics:
    """The destinations of a run's numbers. Every rank has one; the main process writes.

    Attributes:
        start: when training began in this process, in seconds of time.perf_counter().
        bar: of progress, which only the main process shows.
    """

    def __init__(
        self, accelerator: Accelerator, args: Any, total_steps: int, first_step: int
    ) -> None:
        """Open the file, start the trackers and draw the bar. Every rank takes part.

        Args:
            first_step: steps that an earlier call of this run has done.
        """
        self._accelerator = accelerator
        start_trackers(accelerator, args, is_resumed=first_step > 0)
        path = Path(os.devnull)
        if accelerator.is_main_process:
            path = Path(args.output_dir, METRICS)
        self._file = open(path, "a", buffering=1)
        self.bar = tqdm(
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

    def say(self, text: str) -> None:
        """Print a line above the bar, on the main process."""
        if self._accelerator.is_main_process:
            self.bar.write(text)


def finite_or_none(number: float) -> float | None:
    """Return a number as JSON can represent it: None in place of NaN and infinity."""
    return number if math.isfinite(number) else None


def peak_flops(device: torch.device) -> float | None:
    """Return the FLOP/s of dense products in bf16 of a card, None of one that is not known."""
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_name(device)
    return next((peak for name, peak in PEAKS.items() if name in card), None)


def peak_memory_gib(starts_anew: bool = True) -> float:
    """Return the most memory held since a call that started anew; of a host, since it began."""
    on_gpu = torch.cuda.max_memory_allocated()
    if on_gpu:
        if starts_anew:
            torch.cuda.reset_peak_memory_stats()
        return on_gpu / 2**30
    return getrusage(RUSAGE_SELF).ru_maxrss * 1024 / 2**30  # Linux counts it in KiB.


def cut_after(path: Path, step: int, evaluated: bool) -> None:
    """Cut off the lines that a run wrote after `step` into a file with lines in order of steps.

    An incomplete line is cut off too. What is kept is not written again, and so cannot be lost.

    Args:
        evaluated: whether the evaluation after `step` counts as done; if not, it is repeated.
    """
    if not path.exists():
        return
    kept = 0
    for line in path.read_bytes().splitlines(keepends=True):
        found = LINE.match(line)
        if found is None or int(found[1]) > step:
            break
        is_evaluation = found[2] is not None
        if is_evaluation and int(found[1]) == step and not evaluated:
            break
        kept += len(line)
    os.truncate(path, kept)


# ---- Trackers ----
def find_missing_tracker(args: Any) -> Iterator[str]:
    """Yield a line if no such tracker is installed: accelerate would leave it out silently."""
    name = args.report_to
    available = [tracker.value for tracker in get_available_trackers()]
    if name not in ("none", *available) and not (name == "all" and available):
        yield f"--report_to {name}: no such tracker is installed: install it, or choose none"


def start_trackers(accelerator: Accelerator, args: Any, is_resumed: bool) -> None:
    """Start the trackers and give them all arguments. Every rank calls it; rank 0 reports.

    Args:
        is_resumed: whether an earlier call of the run has reported steps.
    """
    project = Path(sys.argv[0]).stem
    settings: dict[str, dict[str, Any]] = {}
    if args.run_name is not None:
        settings = {name: {key: args.run_name} for name, key in NAME_OF_RUN.items()}
        if args.report_to not in NAME_OF_RUN:
            project = args.run_name
    # trackio finds the run to continue by its name, and would make up another one in each call
    settings["trackio"] = {
        "name": args.run_name or args.output_dir,
        "resume": "allow" if is_resumed else "never",
    }
    arguments = {name: str(value) for name, value in vars(args).items()}
    accelerator.init_trackers(project, arguments, settings)
