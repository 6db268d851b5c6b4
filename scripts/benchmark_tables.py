"""Print what scripts/benchmark.py measured as tables, and draw it.

    python scripts/benchmark_tables.py                              # of results/benchmark.json
    python scripts/benchmark_tables.py --picture results/speed.png  # and the picture

A ratio is taken within a repeat, between processes that ran one after the other, and then the
median of these ratios: never the ratio of two means, which a slow minute of the machine would bend.
Ranges are those of the repeats.
"""

import argparse
import json
from pathlib import Path

from bench.picture import draw
from bench.tables import details
from usage import Parser


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "json",
        type=Path,
        nargs="?",
        default=Path("results/benchmark.json"),
        help="what was measured",
    )
    parser.add_argument("--picture", type=Path, metavar="PATH.png", help="draw it here")
    return parser, parser.parse_args()


def main() -> None:
    """Print the tables, and draw the picture if it is asked for."""
    parser, args = parse_args()
    if not args.json.is_file():
        parser.error(f"{args.json} does not exist; scripts/benchmark.py measures it")
    results = json.loads(args.json.read_text())
    print(details(results))
    if args.picture:
        draw(results, args.picture)


if __name__ == "__main__":
    main()
