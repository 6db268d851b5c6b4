# SPDX-License-Identifier: Apache-2.0
"""Compare the planner's peaks with those of torch's MemTracker on real CPU tensors.

    python evidence/validate_planner.py --json results/planner.json
    python evidence/tables.py

Each cell runs two optimizer steps of a random model with the recipe's own loss and optimizer, in
fp32 and one process, and tracks the second. The first cells change one thing at a time; the next
are drawn at random from --seed, so that they are not hand-picked. Nothing in the planner is fitted
to any of them. The last cells compare its two methods with each other on the shapes of Llama with
1, 8 and 70 billion parameters, which are too large to run here. It takes about ten minutes.
"""

import argparse
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from measured.accuracy import METHODS
from usage import Parser

GIB = 2**30
MIB = 2**20


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", type=int, default=24, help="cells drawn at random [%(default)s]")
    parser.add_argument("--seed", type=int, default=6, help="seed of those cells [%(default)s]")
    parser.add_argument("--json", metavar="PATH.json", help="write all cells here")
    return parser.parse_args()


def small_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the cells that fit a CPU; print and yield each."""
    from measured import validation  # takes seconds to import

    for change in validation.ONE_THING:
        row = validation.run(validation.BASE | change)
        print(line_of_small(row, change), flush=True)
        yield row | {"kind": "one thing"}
    for cell in validation.drawn(args.drawn, args.seed):
        row = validation.run(cell)
        print(line_of_small(row, cell), flush=True)
        yield row | {"kind": "drawn"}


def line_of_small(row: dict[str, Any], what: dict[str, Any]) -> str:
    """Return a line for the terminal."""
    errors = ", ".join(f"{method} {row[method]:+.2%}" for method in METHODS)
    return f"{row['measured'] / MIB:9.1f} MiB, {errors}: {what}"


def large_rows() -> Iterator[dict[str, Any]]:
    """Compare the two methods on shapes that are too large to run; print and yield each."""
    from measured import validation  # takes seconds to import

    for large in validation.LARGE:
        row = validation.run_large(large)
        print(
            f"{row['traced bytes'] / GIB:9.1f} GiB traced, closed form {row['closed form']:+.2%}: "
            f"{large.model} {large.flags} {large.how}",
            flush=True,
        )
        yield row | {"kind": "shapes"}


def main() -> None:
    """Run all cells and write them."""
    args = parse_args()
    rows = [*small_rows(args), *large_rows()]
    if args.json:
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        results = {"versions": versions, "seed": args.seed, "cells": rows}
        Path(args.json).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
