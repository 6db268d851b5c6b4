# SPDX-License-Identifier: Apache-2.0
"""Benchmark: the seconds and the host memory that it takes to plan a run of many rows.

    python evidence/benchmark_planning.py --json results/planning.json   # needs 7 GB of disk
    python evidence/benchmark_planning.py --rows 1000000 --ranks 2

Planning is what a run does between the cache of prepared rows and its first batch: read and check
the rows, compute their fingerprint, pack them into lines (in half of the measurements), and make
the first batch of a rank in the middle of the third epoch, as a resumed run does. It is done by
real processes, one for each GPU of a host, which run the functions of recipes/llama.py.

The rows are drawn at random: prepared, with log-normal lengths of up to 4,096 tokens. Times are
those of the slowest rank. Memory is private memory, at its peak and summed over the ranks, beyond
what they had after their imports; and the lines that all ranks share. Pages of the cache of rows,
which all ranks map and the system can take back, are not counted.

Exit codes: 0 measured, 1 a rank failed, 64 usage.
"""

import argparse
import sys
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.planning import Plan, RankError, measure, write_rows
from bench.planning_tables import whole_table
from bench.results_file import write_results
from exits import run_command
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rows",
        nargs="+",
        type=int,
        default=[1_000_000, 10_000_000, 100_000_000],
        help="numbers of rows [%(default)s]",
    )
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the host [%(default)s]")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/benchmark_planning"), help="folder of rows"
    )
    parser.add_argument("--json", type=Path, help="file of the results")
    args = parser.parse_args()
    if min(*args.rows, args.ranks) < 1:
        parser.error("--rows and --ranks must be at least 1")
    return args


def main() -> int:
    """Measure each plan and print the table; return the exit code."""
    args = parse_args()
    args.output_dir.mkdir(parents=True, exist_ok=True)
    results = []
    for number in args.rows:
        file = args.output_dir / f"{number}.arrow"
        write_rows(file, number)
        for packs in (False, True):
            try:
                row = measure(Plan(number, packs, args.ranks), file, args.output_dir / "ranks")
            except RankError as error:
                print(f"benchmark_planning.py: a rank failed:\n{error}", file=sys.stderr)
                return 1
            results.append(row)
        file.unlink()
    print(whole_table(results))
    if args.json:
        write_results(args.json, results)
    return 0


if __name__ == "__main__":
    run_command(main)
