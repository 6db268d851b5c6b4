# SPDX-License-Identifier: Apache-2.0
"""Measure what a rank's autograd keeps of long rows, if ranks share the tokens of each row.

    python evidence/activations.py --json results/activations.json

Each launch is a rehearsal (scripts/rehearse.py) of recipes/llama.py with one row of each length: in
one process, and with 2 and 4 ranks that share each row by context parallelism (fsdp2_cp.yaml) or
sequence parallelism (deepspeed_ulysses.yaml). Counted are the bytes that the ops of the forward
pass keep for the backward pass, logits included, each storage once and weights left out. The table
compares each group's fullest rank with one process. All launches take a few minutes on two cores.
"""

import argparse
import json
import tempfile
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH.json", help="write the table here")
    return parser.parse_args()


def main() -> None:
    """Measure each launch, and print and write its row."""
    args = parse_args()
    from measured import activations  # takes seconds to import
    from proof.results import write_rows

    rows = []
    with tempfile.TemporaryDirectory(prefix="activations_") as name:
        tiny = Path(name) / "tiny"
        activations.make_model_and_rows(tiny)
        for number, group in enumerate(activations.GROUPS):
            row = activations.measure(group, tiny, Path(name) / str(number))
            print(json.dumps(row), flush=True)
            rows.append(row)
            if args.json:
                write_rows(args.json, rows)


if __name__ == "__main__":
    run_command(main)
