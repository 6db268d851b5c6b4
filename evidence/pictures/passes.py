# SPDX-License-Identifier: Apache-2.0
"""The passes of a pipeline's micro-batches, as proof/stage_probe.py notes them in each rank."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# kind, stage, micro-batch, start, end, in seconds
Pass = dict[str, Any]
Batch = list[list[Pass]]  # the passes of each rank


def read_passes(path: Path) -> list[Pass]:
    """Return the passes of a rank in the order in which they ended."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def batches_of(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Return the passes of a rank batch by batch: in each, every pass is there once."""
    seen: Counter = Counter()
    batches: list[list[Pass]] = []
    for one in passes:
        key = (one["kind"], one["stage"], one["micro_batch"])
        number = seen[key]
        seen[key] += 1
        if number == len(batches):
            batches.append([])
        batches[number].append(one)
    return batches


def shortest_batch(ranks: Sequence[Sequence[Pass]]) -> Batch:
    """Return the passes of the batch that took least time, by rank, with times from its start.

    Other programs disturb it least. The first batch is left out, in which buffers are made.

    Args:
        ranks: all passes of each rank.
    """
    by_rank = [batches_of(passes) for passes in ranks]
    batches = [list(batch) for batch in zip(*by_rank, strict=True)][1:]
    shortest = min(batches, key=duration_of)
    start = min(one["start"] for passes in shortest for one in passes)
    shifted = []
    for passes in shortest:
        shifted.append([one | times_from(start, one) for one in passes])
    return shifted


def times_from(start: float, one: Pass) -> dict[str, float]:
    """Return the times of a pass from the start of its batch, in seconds, to 10 microseconds."""
    return {name: round(one[name] - start, 5) for name in ("start", "end")}


def duration_of(batch: Batch) -> float:
    """Return the seconds from the start of the first pass of a batch to the end of the last."""
    starts = [one["start"] for passes in batch for one in passes]
    ends = [one["end"] for passes in batch for one in passes]
    return max(ends) - min(starts)


def idle_share(batch: Batch) -> float:
    """Return the share of a batch's time in which a rank computes nothing, over all ranks."""
    busy = sum(one["end"] - one["start"] for passes in batch for one in passes)
    return 1 - busy / (duration_of(batch) * len(batch))
