# SPDX-License-Identifier: Apache-2.0
"""Train a tiny model of each family with recipes/llama.py, and compare it with transformers.

    python scripts/model_families.py --json results/model_families.json    # all of them
    python scripts/model_families.py --families llama gemma2 qwen3_moe     # some; --list names all
"""

import argparse
import sys
import tempfile
from pathlib import Path

from families.catalog import FAMILIES
from usage import Parser


def parse_args() -> argparse.Namespace:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, metavar="FAMILY", default=list(FAMILIES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--warm", action="store_true")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    from families.judge import measure
    from families.models import write_rows
    with tempfile.TemporaryDirectory(prefix="families_") as name:
        folder = Path(name)
        rows = write_rows(folder)
        for family in args.families:
            row = measure(family, rows, folder / family, warm=args.warm)
            print(row, flush=True)


if __name__ == "__main__":
    main()
