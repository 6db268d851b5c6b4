# SPDX-License-Identifier: Apache-2.0
"""Benchmark: how many rows per second and core the recipe prepares, and TRL's SFTTrainer.

    python evidence/benchmark_rows.py              # some minutes on an idle machine
    python evidence/benchmark_rows.py --smoke      # a few rows: does it run?

Preparing means to read a .jsonl file, to render the chat template, to tokenize, to find what is
trained on, to check the rows, and to write them to the cache: `load_data` of recipes/llama.py, and
the constructor of SFTTrainer with assistant_only_loss. Both read the same file of conversations
made from the questions and answers of GSM8K (https://github.com/openai/grade-school-math, MIT),
with one or four of them in each row, and the same tokenizer, which is trained on them. Its chat
template marks the assistant's text with {% generation %}. SFTTrainer needs these marks. The recipe
also runs with the same template without them, which takes it one more rendering per message.

Each measurement is the CPU time (with that of child processes) in a process of its own, with one
thread and an empty cache, and the contestants run in turn (A B C A B C ...). There is no figure
unless the token ids and labels of all rows are equal. A run during which the machine was busy with
something else is repeated, and left out if that does not help; with --any_load it counts, and the
published table says so. The contestants suffer alike.

Exit codes: 0 all rows are equal, 1 they are not or a run failed, 64 usage.
"""

import argparse
import sys
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from bench.preparation import CELLS, Settings, make_inputs, passed, run_cell
from bench.preparation_tables import whole_table
from bench.prepare import NoModelError
from bench.tables import as_text
from exits import run_command
from usage import Parser


def parse_args() -> tuple[Parser, argparse.Namespace]:
    """Return the parser and the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="runs of each contestant")
    parser.add_argument(
        "--any_load", action="store_true", help="do not wait until the machine is idle"
    )
    parser.add_argument("--smoke", action="store_true", help="prepare a few generated rows")
    parser.add_argument(
        "--data", type=Path, default=Path("../shared/data/gsm8k"), help="folder of the GSM8K rows"
    )
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/benchmark_rows"), help="folder of all runs"
    )
    parser.add_argument(
        "--json",
        type=Path,
        help="file of the results (default: results/preparation.json; with --smoke: none)",
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats {args.repeats}: must be at least 1")
    if args.json is None and not args.smoke:
        args.json = Path("results/preparation.json")
    return parser, args


def main() -> int:
    """Measure all cells; return the exit code."""
    parser, args = parse_args()
    if not args.smoke and not (args.data / "train.jsonl").is_file():
        parser.error(
            f"--data {args.data}: has no train.jsonl; "
            "download GSM8K from https://github.com/openai/grade-school-math"
        )
    folder = args.output_dir / "smoke" if args.smoke else args.output_dir
    settings = Settings(folder, args.data, args.smoke, args.any_load)
    try:
        make_inputs(settings)
    except NoModelError as error:
        sys.exit(f"benchmark_rows.py: {error}")
    results = []
    for cell in CELLS:
        result = run_cell(cell, settings, args.repeats)
        print(f"\n## {cell}\n\n{whole_table(result)}\n", flush=True)
        results.append(result)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(as_text(results))
    return 0 if all(passed(result) for result in results) else 1


if __name__ == "__main__":
    run_command(main)
