# SPDX-License-Identifier: Apache-2.0
"""Print the results of evidence/benchmark.py as tables.

    python evidence/benchmark_tables.py                         # of results/benchmark.json
    python evidence/benchmark_tables.py runs/benchmark/my.json  # of other results

A ratio is taken within a repeat, between processes that ran one after the other. The table shows
the median of these ratios, never the ratio of two means, which one slow minute of the machine would
distort. Ranges are over the repeats.
"""

import argparse
import json
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.tables import details
from exits import run_command
from usage import Parser


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "json",
        type=Path,
        nargs="?",
        default=Path("results/benchmark.json"),
        help="the results",
    )
    return parser, parser.parse_args()


def main() -> None:
    """Print the tables."""
    parser, args = parse_args()
    if not args.json.is_file():
        parser.error(f"{args.json} does not exist; evidence/benchmark.py writes it")
    results = json.loads(args.json.read_text())
    print(details(results))


if __name__ == "__main__":
    run_command(main)
