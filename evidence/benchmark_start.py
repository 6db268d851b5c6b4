# SPDX-License-Identifier: Apache-2.0
"""Benchmark: what a rank of up to 1,024 does at its start that is this project's own work.

    python evidence/benchmark_start.py --json results/start.json   # some minutes
    python evidence/benchmark_start.py --ranks 8 64 --rows 100000

Three things are simulated in this process, rank after rank, with the functions that the recipes
call. All times are CPU time.

    deal      which rows are in a rank's batches, of an epoch of --rows rows with log-normal
              lengths, 8 in a batch. The first batches of all simulated ranks must have different
              rows. With group_by_length a rank sorts the rows of 50 steps of all ranks, so that
              only 16 ranks are simulated. Memory is the peak of what a rank allocates.
    owners    which rank keeps which tensors of the training state (weights and AdamW's two moments
              in fp32) while a checkpoint is written
    planner   scripts/plan_memory.py, as a process of its own: full fine-tuning under FSDP2

Exit codes: 0 measured, 1 ranks got the same rows or the planner failed, 64 usage.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import rooms  # noqa: F401  before what it makes importable
from bench.start_tables import whole_text
from exits import run_command
from usage import Parser

Row = dict[str, Any]

MODELS = ("8B", "70B")


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        default=[8, 64, 512, 1024],
        help="numbers of ranks [%(default)s]",
    )
    parser.add_argument("--rows", type=int, default=10_000_000, help="rows to deal [%(default)s]")
    parser.add_argument("--json", type=Path, help="file of the results")
    args = parser.parse_args()
    if min(*args.ranks, args.rows) < 1:
        parser.error("--ranks and --rows must be at least 1")
    return args


def measure(args: argparse.Namespace) -> dict[str, list[Row]]:
    """Return the rows of the three tables.

    Raises:
        ValueError: two ranks got the same rows.
        RuntimeError: the planner failed.
    """
    from bench import start  # This takes seconds.

    found: dict[str, list[Row]] = {"deal": [], "owners": [], "planner": []}
    rows = start.RowsWithLengths(args.rows)
    for strategy in start.STRATEGIES:
        for ranks in args.ranks:
            found["deal"].append(start.measure_deal(ranks, rows, strategy))
    with tempfile.TemporaryDirectory(prefix="benchmark_start_") as folder:
        for model in MODELS:
            sizes = start.tensors_of_state(model)
            for ranks in args.ranks:
                found["owners"].append(start.measure_owners(model, sizes, ranks))
                found["planner"].append(start.measure_planner(model, ranks, Path(folder)))
    return found


def main() -> int:
    """Measure and print the tables; return the exit code."""
    args = parse_args()
    try:
        found = measure(args)
    except (RuntimeError, ValueError) as error:
        print(f"benchmark_start.py: {error}", file=sys.stderr)
        return 1
    print(whole_text(found))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(as_text(found))
    return 0


def as_text(found: dict[str, list[Row]]) -> str:
    """Return the results as JSON, one row a line."""
    groups = []
    for name, rows in found.items():
        lines = ",\n".join(json.dumps(row) for row in rows)
        groups.append(f'"{name}": [\n{lines}\n]')
    return "{" + ",\n".join(groups) + "}\n"


if __name__ == "__main__":
    run_command(main)
