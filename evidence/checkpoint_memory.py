# SPDX-License-Identifier: Apache-2.0
"""Measure in real processes how much host memory each rank takes to save.

    python evidence/checkpoint_memory.py --json results/checkpoint_memory.json
    python evidence/checkpoint_memory.py --configs fsdp2_full_shard tp --ranks 2

Each launch is a rehearsal (scripts/rehearse.py) of one step of recipes/llama.py, llama_pipeline.py
or mixtral.py, on models of 55 and 41 million parameters in fp32. It writes a checkpoint and the
folder that `from_pretrained` loads; a second launch writes its checkpoint with --async_save. For
each of the three the table has the bytes by which the private memory of a rank grew at most
(RssAnon, sampled), beside the bound that the rank promises to keep: its share of the tensors and
twice the largest tensor. On CPU ranks, only --async_save copies what a rank holds whole anyway.
Then it works out what is needed for 8 and 70 billion parameters, from the owners that the recipes
choose for their tensors.

Exit codes: 0 measured and within the bound, 1 a run failed or a rank took more, 64 usage.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from measured.rehearsals import all_names
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = all_names()
    parser.add_argument(
        "--configs", nargs="+", choices=names, default=names, help="YAML files [all]"
    )
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks [%(default)s]")
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH.json",
        help="write the results here; rows of other YAMLs stay",
    )
    return parser.parse_args()


def main() -> int:
    """Measure each launch and print its row; return the exit code."""
    args = parse_args()
    # These imports take seconds.
    from measured import save_memory

    rows = []
    has_failed = False
    planned = [save_memory.row_on_paper(*case) for case in save_memory.ON_PAPER]
    with tempfile.TemporaryDirectory(prefix="checkpoint_memory_") as name:
        folder = Path(name)
        save_memory.make_models(folder / "models")
        for config in args.configs:
            mesh = save_memory.mesh_of(config, args.ranks)
            try:
                row = save_memory.measure(mesh, folder / "models", folder / config)
            except RuntimeError as error:
                print(f"checkpoint_memory.py: {config} failed:\n{error}", file=sys.stderr)
                has_failed = True
                continue
            print(json.dumps(row), flush=True)
            rows.append(row)
            if args.json:
                save_memory.write_table(args.json, row, planned)
    return 1 if has_failed or not all(save_memory.is_within(row) for row in rows) else 0


if __name__ == "__main__":
    run_command(main)
