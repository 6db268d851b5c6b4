# SPDX-License-Identifier: Apache-2.0
"""Prepared rows of any number, and what ranks of one host take to plan a run of them."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

import paths  # noqa: F401  makes recipes/ importable

RANK = Path(__file__).with_name("planning_rank.py")
ROWS_PER_BATCH = 25_000  # about what components/rows.py writes for rows of this length
MEDIAN_LENGTH = 245
LONGEST = 4096


@dataclass(frozen=True)
class Plan:
    """A run to plan.

    Attributes:
        rows: their number.
        packs: whether rows are packed.
        ranks: the processes of the host.
    """

    rows: int
    packs: bool
    ranks: int


class RankError(Exception):
    """A rank has failed."""


def write_rows(file: Path, number: int) -> None:
    """Write prepared rows as components/rows.py caches them, with lengths drawn at random.

    The lengths are log-normal. Each row has only two tokens, whatever its length is: planning does
    not read tokens.
    """
    from datasets import Features, List, Value

    tokens = List(Value("int32"))
    whole_number = Value("int64")
    text = Value("string")
    features = Features(
        input_ids=tokens,
        labels=tokens,
        length=whole_number,
        largest=whole_number,
        hash=whole_number,
        whole_length=whole_number,
        truncated=Value("bool"),
        problem=text,
        not_read=text,
        number_in_file=whole_number,
    )
    schema = features.arrow_schema
    chance = np.random.default_rng(0)
    staged = file.with_suffix(".tmp")
    with pyarrow.OSFile(str(staged), "wb") as stream:
        out = pyarrow.ipc.new_stream(stream, schema)
        for start in range(0, number, ROWS_PER_BATCH):
            size = min(ROWS_PER_BATCH, number - start)
            columns = columns_of(size, start, chance)
            batch = pyarrow.record_batch(columns, schema=schema)
            out.write_batch(batch)
        out.close()
    staged.rename(file)


def columns_of(size: int, start: int, chance: np.random.Generator) -> dict[str, Any]:
    """Return the columns of `size` rows, before which there are `start` others."""
    drawn = chance.lognormal(np.log(MEDIAN_LENGTH), 1, size)
    lengths = drawn.clip(1, LONGEST).astype(np.int64)
    ends = np.arange(0, 2 * size + 1, 2, dtype=np.int32)
    tokens = np.ones(2 * size, dtype=np.int32)
    lists = pyarrow.ListArray.from_arrays(ends, tokens)
    return {
        "input_ids": lists,
        "labels": lists,
        "length": lengths,
        "largest": np.full(size, 31_999),
        "hash": chance.integers(0, 2**62, size),
        "whole_length": lengths,
        "truncated": lengths == LONGEST,
        "problem": [""] * size,
        "not_read": ["[]"] * size,
        "number_in_file": np.arange(start + 1, start + size + 1),
    }


def measure(plan: Plan, file: Path, folder: Path) -> dict[str, Any]:
    """Plan a run with real processes, and return what it took as a row of the table.

    Raises:
        RankError: a rank has failed, with the end of what the ranks said.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.json"):
        old.unlink()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launch += ["--nproc_per_node", str(plan.ranks)]
    launch += [str(RANK), str(file), str(folder), str(int(plan.packs))]
    done = subprocess.run(launch, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RankError(done.stderr[-3000:])
    ranks = []
    for path in sorted(folder.glob("*.json")):
        ranks.append(json.loads(path.read_text()))
    private = [rank["private_bytes"] for rank in ranks]
    return {
        "rows": plan.rows,
        "ranks": plan.ranks,
        "packs": plan.packs,
        "full": ranks[0]["full"],
        "seconds": slowest(ranks),
        "private_bytes": sorted(private, reverse=True),
        "shared_bytes": ranks[0]["shared_bytes"],
    }


def slowest(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds that each phase took on the rank that took longest."""
    seconds = {}
    for name in ranks[0]["seconds"]:
        seconds[name] = max(rank["seconds"][name] for rank in ranks)
    return seconds
