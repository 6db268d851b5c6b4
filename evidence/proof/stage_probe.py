# SPDX-License-Identifier: Apache-2.0
"""In a rank of a rehearsal: when it computes which pass of which micro-batch of a pipeline."""

import functools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import PipelineStage

# What is computed, by the method of a stage: forward, backward, its part for the weights
METHODS = {
    "forward": "forward_one_chunk",
    "backward": "backward_one_chunk",
    "weights": "backward_weight_one_chunk",
}


def track(path: Path) -> None:
    """Write a line of JSON to `path` for each pass: its kind, stage, micro-batch, start and end.

    The times are seconds of the host's monotonic clock, which its processes share.
    """
    file = open(path, "w", buffering=1)
    for kind, name in METHODS.items():
        original = getattr(PipelineStage, name)
        setattr(PipelineStage, name, timed(original, kind, file.write))


def timed(original: Callable, kind: str, write: Callable[[str], Any]) -> Callable:
    """Return a method of a stage that also writes a line about each call."""

    @functools.wraps(original)
    def call_and_write(stage: Any, number: int, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        result = original(stage, number, *args, **kwargs)
        end = time.monotonic()
        line = {"kind": kind, "stage": stage.stage_index, "micro_batch": number}
        write(json.dumps(line | {"start": start, "end": end}) + "\n")
        return result

    return call_and_write
