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
from proof.markdown import table

RANK = Path(__file__).with_name("planning_rank.py")
ROWS_PER_BATCH = 25_000  # about what components/rows.py writes for rows of this length
MEDIAN_LENGTH = 245
LONGEST = 4096
MIB = 2**20
PHASES = ("read and check", "fingerprint", "pack", "first batch")


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

    kinds = {name: Value("int64") for name in ("length", "largest", "hash", "whole_length")}
    tokens = {"input_ids": List(Value("int32")), "labels": List(Value("int32"))}
    found = {"truncated": Value("bool"), "problem": Value("string"), "not_read": Value("string")}
    features = Features({**tokens, **kinds, **found, "number_in_file": Value("int64")})
    schema = features.arrow_schema
    chance = np.random.default_rng(0)
    staged = file.with_suffix(".tmp")
    with pyarrow.OSFile(str(staged), "wb") as stream, pyarrow.ipc.new_stream(stream, schema) as out:
        for start in range(0, number, ROWS_PER_BATCH):
            size = min(ROWS_PER_BATCH, number - start)
            lengths = chance.lognormal(np.log(MEDIAN_LENGTH), 1, size).clip(1, LONGEST)
            columns = columns_of(lengths.astype(np.int64), start, chance)
            out.write_batch(pyarrow.record_batch(columns, schema=schema))
    staged.rename(file)


def columns_of(lengths: np.ndarray, start: int, chance: np.random.Generator) -> dict[str, Any]:
    """Return the columns of rows of these lengths, the first of which has the number `start`."""
    size = len(lengths)
    ends = pyarrow.array(np.arange(0, 2 * size + 1, 2, dtype=np.int32))
    tokens = pyarrow.array(np.ones(2 * size, dtype=np.int32))
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
    launch += ["--nproc_per_node", str(plan.ranks), str(RANK)]
    done = subprocess.run(
        [*launch, str(file), str(folder), str(int(plan.packs))],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RankError(done.stderr[-3000:])
    ranks = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    phases: dict[str, dict[str, float]] = {}
    for name in ranks[0]["phases"]:
        found = [rank["phases"][name] for rank in ranks]
        phases[name] = {key: max(phase[key] for phase in found) for key in found[0]}
    return {
        "rows": plan.rows,
        "ranks": plan.ranks,
        "packs": plan.packs,
        "full": ranks[0]["full"],
        "phases": phases,
        "private_bytes": sorted((rank["private_bytes"] for rank in ranks), reverse=True),
        "shared_bytes": ranks[0]["shared_bytes"],
    }


def planning_table(results: list[dict[str, Any]]) -> str:
    """Return the table of what planning takes, by number of rows."""
    lines = []
    for row in results:
        phases = row["phases"]
        seconds = [f"{phases[name]['seconds']:.1f}" if name in phases else "" for name in PHASES]
        total = sum(phase["seconds"] for phase in phases.values())
        processor = sum(phase["cpu_seconds"] for phase in phases.values())
        private = sum(row["private_bytes"]) / MIB
        lines.append(
            [
                f"{row['rows']:,}",
                str(row["ranks"]),
                f"{row['full']:.2%}" if row["packs"] else "not packed",
                *seconds,
                f"{total:.1f}",
                f"{processor:.1f}",
                f"{private:,.0f} + {row['shared_bytes'] / MIB:,.0f}",
            ]
        )
    header = ["rows", "ranks", "lines full", *PHASES, "seconds", "of CPU", "MiB a host"]
    return table(header, lines)
