# SPDX-License-Identifier: Apache-2.0
"""Run every quickstart, and record what the model learned and how long it took, for the README.

    python evidence/time_quickstarts.py --json results/quickstarts.json   # about ten minutes
    python evidence/time_quickstarts.py --recipes bert llama

Each is `make quickstart RECIPE=...` in the environment that runs this script, in a folder of its
own. "Before" and "after" are measured on held-out rows: the exact match that scripts/generate.py
prints, or the first and the last evaluation in metrics.jsonl. Seconds are those of the whole
command without the installation of packages.

Exit codes: 0 done, 1 an example failed, 64 usage.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.quickstarts import RECIPES, ExampleError, line_of, run_example, write_rows
from exits import run_command
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--recipes", nargs="+", choices=RECIPES, default=RECIPES, help="quickstarts (default: all)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results here; other recipes there stay"
    )
    return parser.parse_args()


def main() -> None:
    """Run the quickstarts, print what each model learned, and write the rows."""
    args = parse_args()
    rows = []
    for recipe in args.recipes:
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = run_example(recipe, Path(folder) / "out")
            except ExampleError as error:
                sys.exit(f"{recipe}: {error}")
        print(line_of(row), flush=True)
        rows.append(row)
    if args.json:
        write_rows(args.json, rows)


if __name__ == "__main__":
    run_command(main)
