# SPDX-License-Identifier: Apache-2.0
"""Benchmark: how long a checkpoint holds up training, with --async_save and without.

    python evidence/benchmark_saving.py --json results/saving.json   # 4 GB of disk, 9 of memory
    python evidence/benchmark_saving.py --ranks 1 --saves 1

Each run is recipes/llama.py on a model of 97 million parameters, on one process and on CPU ranks
under fsdp2_full_shard.yaml (scripts/rehearse.py). Every rank records the seconds that its main
thread spends on checkpoints, until they are whole; numbers are the median of the saves, and of the
steps, on the rank that took longest. The save after the last step is left out, since no training is
left beside it.

On CPU ranks the threads that write take processor time from training, so that steps beside a save
are slower; on a GPU, training does not need these processors.

Exit codes: 0 measured, 1 a run failed, 64 usage.
"""

import argparse
import sys
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.results_file import write_results
from bench.saving import Job, RunError, make_model_and_rows, measure
from bench.saving_tables import whole_table
from exits import run_command
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1, 4], help="numbers of ranks [%(default)s]"
    )
    parser.add_argument("--saves", type=int, default=2, help="saves to measure [%(default)s]")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/benchmark_saving"), help="folder of the runs"
    )
    parser.add_argument("--json", type=Path, help="file of the results")
    args = parser.parse_args()
    if min(*args.ranks, args.saves) < 1:
        parser.error("--ranks and --saves must be at least 1")
    return args


def main() -> int:
    """Measure each run and print the table; return the exit code."""
    args = parse_args()
    tiny = args.output_dir / "tiny"
    if not tiny.exists():
        make_model_and_rows(tiny)
    results = []
    for ranks in args.ranks:
        for in_background in (False, True):
            job = Job(ranks, in_background, args.saves)
            try:
                results.append(measure(job, tiny, args.output_dir / "run"))
            except RunError as error:
                print(f"benchmark_saving.py: a run failed:\n{error}", file=sys.stderr)
                return 1
    print(whole_table(results))
    if args.json:
        write_results(args.json, results)
    return 0


if __name__ == "__main__":
    run_command(main)
