# SPDX-License-Identifier: Apache-2.0
"""Which model families recipes/llama.py trains: its loss beside the model's own.

    python evidence/model_families.py --warm --json results/model_families.json   # all families
    python evidence/model_families.py --families llama gemma2 qwen3_moe           # some of them
    python evidence/model_families.py --list

Each family has a tiny configuration (evidence/families/catalog.yaml), with random weights. The
shipped recipe trains it as a whole and with LoRA under single.yaml, and as a whole on two processes
under fsdp.yaml, all in fp32 on CPU ranks through scripts/rehearse.py. No flag chooses the
attention, the layers that get adapters, or what FSDP wraps. In each run

- the first loss must be what the model computes by itself on the same rows, padded, with an
  attention mask and labels: model(**batch, labels=labels) in transformers;
- the loss must fall, and each LoRA adapter must have been trained;
- the result must load, by from_pretrained or as adapters on the untouched model, and have the loss
  that the trained model had.

Losses are equal within 1e-6 (relative). A mixture of experts adds its router's loss to its own loss
only with `output_router_logits`, which is off; this recipe leaves it out, and recipes/mixtral.py
adds it.

Exit codes: 0 all families are as described, 1 one is not, 64 usage, 73 cannot write.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rooms  # noqa: F401  before what it makes importable
from exits import Exit, first_line, run_command, stop
from families.catalog import FAMILIES
from proof.results import read_rows, write_rows
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        default=list(FAMILIES),
        metavar="FAMILY",
        help="model types of transformers (default: all of --list)",
    )
    parser.add_argument("--list", action="store_true", help="print the families and stop")
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the rows here; other families there stay"
    )
    parser.add_argument(
        "--warm",
        action="store_true",
        help="start from processes that have already imported the libraries",
    )
    return parser.parse_args()


def measure_all(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the row of each chosen family as soon as it is available, in their order."""
    from families.judge import measure  # takes seconds to import
    from families.models import write_rows as write_training_rows

    rows = write_training_rows(folder)
    for family in args.families:
        yield measure(family, rows, folder / family, warm=args.warm)


def write(path: Path, measured: list[dict[str, Any]]) -> None:
    """Write rows in the order of the catalog, keeping the rows of other families."""
    row_of = {row["family"]: row for row in [*read_rows(path), *measured]}
    in_order = [row_of[family] for family in FAMILIES if family in row_of]
    try:
        write_rows(path, in_order)
    except OSError as error:
        stop(Exit.CANNOT_WRITE, f"cannot write {path}: {first_line(error)}")


def main() -> None:
    """Measure the chosen families, and print and write their rows."""
    args = parse_args()
    if args.list:
        print("\n".join(FAMILIES))
        return
    measured = []
    with tempfile.TemporaryDirectory(prefix="families_") as name:
        for row in measure_all(args, Path(name)):
            print(f"{row['verdict']:>6}  {row['family']}", *row["problems"], sep="  ", flush=True)
            measured.append(row)
            if args.json:
                write(args.json, measured)
    failed = any(row["problems"] for row in measured)
    sys.exit(int(Exit.FAILED) if failed else 0)


if __name__ == "__main__":
    run_command(main)
