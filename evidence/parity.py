# SPDX-License-Identifier: Apache-2.0
"""Parity: one job gives the same numbers under every YAML, batch split and kind of weights.

    python evidence/parity.py                                 # all runs: an hour on two cores
    python evidence/parity.py --groups cuts checkpointing      # some of them; --list names all
    python evidence/parity.py --recipes bert t5                # every run of these recipes
    python evidence/parity.py --json results/parity.json       # what the README's tables show

The job has rows of different lengths, accumulation, gradient clipping that takes effect, warm-up
and cosine decay, and weight decay. Its 20 steps are more than one epoch, so that one window of
accumulation has fewer rows. Each run is the shipped recipe under the shipped YAML through
`scripts/rehearse.py`, in fp32 on CPU ranks, and is compared with the same job in one process: the
largest relative difference over the steps in loss, gradient norm and learning rate, and over the
tensors in the final weights (||a - b|| / ||b||, Frobenius). The bytes that each rank held are
compared with the YAML's promise.

A combination that the recipe rightly refuses is listed with the reason.

Exit codes: 0 all runs are within their bounds, 1 one is not, 64 usage.
"""

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from paths import OF_PIPELINES
from proof.jobs import MAKERS, Run, all_runs, configs, expert_configs, mesh_configs, reference_of
from proof.launch import make_model
from proof.parity_table import measure, merge, tables
from proof.results import read_rows, write_rows
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Read the command line; `runs` are the chosen runs."""
    groups = list(dict.fromkeys(run.group for run in all_runs()))
    names = [*configs(), *mesh_configs(), *expert_configs(), OF_PIPELINES.stem]
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--groups", nargs="+", choices=groups, default=groups, help="groups of runs (default: all)"
    )
    parser.add_argument(
        "--configs", nargs="+", choices=names, default=names, help="YAML files (default: all)"
    )
    parser.add_argument(
        "--recipes", nargs="+", choices=MAKERS, default=list(MAKERS), help="recipes (default: all)"
    )
    parser.add_argument("--list", action="store_true", help="print the runs and stop")
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/parity"), help="folder of all runs"
    )
    parser.add_argument(
        "--json", type=Path, metavar="PATH", help="write the results here; other runs there stay"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.cpu_count(),
        help="launches at a time (default: one per core)",
    )
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    args.runs = chosen_runs(args)
    if not args.runs:
        parser.error(
            f"no run of {', '.join(args.groups)} is of {', '.join(args.recipes)} under "
            f"{', '.join(args.configs)}; "
            "--list shows all runs"
        )
    return args


def chosen_runs(args: argparse.Namespace) -> list[Run]:
    """Return the runs of the chosen groups and recipes under the chosen YAML files."""
    of_groups = [run for run in all_runs() if run.group in args.groups]
    of_recipes = [run for run in of_groups if run.model in args.recipes]
    return [run for run in of_recipes if run.config in args.configs]


def measure_in(output_dir: Path, run: Run) -> dict:
    """Launch one run in a folder of its own, print its verdict, and return its row."""
    tiny = output_dir / run.tiny
    row = measure(run, tiny, output_dir / run.name, output_dir / reference_of(run).name)
    print(f"{row['verdict']:>13}  {run.group}: {run.name}", flush=True)
    return row


def measure_all(args: argparse.Namespace) -> list[dict]:
    """Launch the references first, then the runs that are compared with them; return all rows."""
    references = list(dict.fromkeys(reference_of(run) for run in args.runs))
    others = [run for run in args.runs if run not in references]
    rows = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for runs in (references, others):
            rows += pool.map(lambda run: measure_in(args.output_dir, run), runs)
    return rows


def main() -> None:
    """Measure the chosen runs, print their tables, and write their rows."""
    args = parse_args()
    if args.list:
        print("\n".join(f"{run.group}: {run.name}" for run in args.runs))
        return
    for tiny, maker in {run.tiny: run.maker for run in args.runs}.items():
        make_model(args.output_dir / tiny, maker)
    rows = measure_all(args)
    rows = merge(rows, read_rows(args.json), args.runs)
    print(f"\n{tables(rows)}")
    if args.json:
        write_rows(args.json, rows)
    failed = any(row["verdict"] not in ("ok", "refused") for row in rows)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    run_command(main)
